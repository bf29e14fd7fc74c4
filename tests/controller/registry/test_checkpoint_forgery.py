"""Bytes of a checkpoint: nobody replaces them, or puts others where they will be, and forged ones are found."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import xxhash

from fleetstart.controller.cli.api_client import Address, ApiClient
from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.verify import remove_parts, verify
from fleetstart.runtime.contract.errors import Forbidden
from fleetstart.runtime.contract.object_keys import digest_in_name, is_object_name, name_with_digest
from fleetstart.runtime.contract.weights.manifest import manifest_bytes
from tests.controller.auth.test_keys import anybody, bearer, error, lock, make
from tests.controller.cli.checkpoints import MemoryStore, Tensor, model, no_progress, write_model
from tests.controller.conftest import ControllerProcess
from tests.controller.manifests import PART, manifest, objects_of
from tests.forgery import FORGED_BYTES, forge

DIGEST = "0123456789abcdef" * 4


def test_two_chunks_of_one_checksum_are_made_at_once() -> None:
    data = os.urandom(1 << 20)
    forged = forge(data, b"x" * FORGED_BYTES)
    assert len(forged) == len(data)
    assert forged != data
    assert xxhash.xxh3_64_intdigest(forged) == xxhash.xxh3_64_intdigest(data)


@pytest.mark.parametrize("terms", [{"functions": ["own"]}, {"project": "a"}, {}], ids=["function", "project", "none"])
def test_no_key_replaces_a_part_of_anybodys_weights(
    controller: ControllerProcess, tmp_path: Path, terms: dict[str, object]
) -> None:
    admin = lock(controller)
    controller.http.put("/api/v1/projects/a", json={}).raise_for_status()
    key = make(controller, "other", ["deploy"], **terms)
    folder = write_model(tmp_path / "w", {"layers.0.w": _large(), **model()})
    with ApiClient(Address(controller.url, admin)) as server:
        published = publish(folder, server, cache=tmp_path / "cache", progress=no_progress)
        (part,) = (controller.home / "store" / "checkpoints" / published.id).glob("part-*")
        whole = part.read_bytes()
        forged = whole[:4096] + forge(whole[4096:], b"f" * FORGED_BYTES)
        with anybody(controller) as client:
            url = f"/api/v1/objects/checkpoints/{published.id}/{part.name}"
            if terms:
                assert client.put(url, content=whole, headers=bearer(key)).status_code == 403, "no upload is open"
                data = (controller.home / "store" / "checkpoints" / published.id / "manifest.json").read_bytes()
                client.post("/api/v1/uploads", content=data, headers=bearer(key)).raise_for_status()
            assert client.put(url, content=forged, headers=bearer(key)).status_code == 400
            assert client.put(url, content=whole, headers=bearer(key)).status_code == 200
            assert part.read_bytes() == whole
            legacy = f"/api/v1/objects/checkpoints/{published.id}/part-00001-of-00001.safetensors"
            assert client.put(legacy, content=forged, headers=bearer(key)).status_code == (403 if terms else 201)
            layer = f"/api/v1/objects/layers/{DIGEST}/part-00000"
            assert client.put(layer, content=b"x", headers=bearer(key)).status_code == (403 if terms else 201)
            repair = f"/api/v1/checkpoints/{published.id}/parts/{part.name}"
            assert client.delete(repair, headers=bearer(key)).status_code == 403
        assert part.read_bytes() == whole
        assert verify(server, published.id, no_progress) == []


def test_a_part_of_an_older_checkpoint_is_written_once(controller: ControllerProcess) -> None:
    data = manifest_bytes(manifest())
    part = next(iter(objects_of(data)))
    for content, status in ((PART, 201), (PART, 200), (PART[::-1], 409), (PART[:-1], 409), (PART, 200)):
        answer = controller.http.put(f"/api/v1/objects/{part}", content=content)
        assert answer.status_code == status
    answer = controller.http.put(f"/api/v1/objects/{part}", content=PART[:-1])
    assert error(answer)["code"] == "conflict"
    assert "4,160, and 4,159 came" in error(answer)["message"]
    assert "--repair" in error(answer)["hint"]
    assert (controller.home / "store" / part).read_bytes() == PART


def test_a_forged_part_is_found_and_an_admin_removes_it(controller: ControllerProcess, tmp_path: Path) -> None:
    """Forged in the store's own folder, with the checksums that it had."""
    admin = lock(controller)
    folder = write_model(tmp_path / "w", {"layers.0.w": _large(), **model()})
    with ApiClient(Address(controller.url, admin)) as server:
        published = publish(folder, server, cache=tmp_path / "cache", progress=no_progress)
        (part,) = (controller.home / "store" / "checkpoints" / published.id).glob("part-*")
        whole = part.read_bytes()
        part.write_bytes(whole[:4096] + forge(whole[4096:], b"f" * FORGED_BYTES))
        (bad,) = verify(server, published.id, no_progress)
        assert (bad.object, bad.offset) == (part.name, 4096)
        assert "with an equal checksum" in str(bad)
        at = f"/api/v1/objects/checkpoints/{published.id}/{part.name}"
        assert controller.http.put(at, content=part.read_bytes()).status_code == 400
        assert controller.http.put(at, content=whole).status_code == 201, "who has the right bytes may mend it"
        assert verify(server, published.id, no_progress) == []
        part.write_bytes(whole[:4096] + forge(whole[4096:], b"f" * FORGED_BYTES))
        with (
            ApiClient(Address(controller.url, make(controller, "deployer", ["deploy"]))) as weak,
            pytest.raises(Forbidden),
        ):
            remove_parts(weak, published.id, [bad])
        assert remove_parts(server, published.id, [bad]) == [part.name]
        assert controller.http.get("/api/v1/checkpoints").json()[0]["problem"] == f"{part.name} is missing"
        publish(folder, server, cache=tmp_path / "cache", progress=no_progress)
        assert verify(server, published.id, no_progress) == []
        assert [line["verb"] for line in controller.http.get("/api/v1/audit").json()].count("checkpoint.part.rm") == 2


def test_a_list_tells_which_checkpoints_are_protected(controller: ControllerProcess, tmp_path: Path) -> None:
    for key, content in objects_of(manifest_bytes(manifest())).items():
        controller.http.put(f"/api/v1/objects/{key}", content=content).raise_for_status()
    with ApiClient(controller.url) as server:
        published = publish(write_model(tmp_path / "w", model()), server, cache=tmp_path, progress=no_progress)
    infos = controller.http.get("/api/v1/checkpoints").json()
    assert {info["id"]: info["protected"] for info in infos if info["protected"]} == {published.id: True}
    assert len(infos) == 2


@pytest.mark.parametrize("name", ["", "manifest.json", "..%2f..%2fx", "x" * 200, "%2e%2e"])
def test_what_is_no_part_is_not_removed(controller: ControllerProcess, name: str) -> None:
    assert controller.http.delete(f"/api/v1/checkpoints/{DIGEST}/parts/{name}").status_code in (400, 404, 405)


def test_a_parts_name_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(write_model(tmp_path / "w", model()), store, cache=tmp_path, progress=no_progress)
    parts = {key.rpartition("/")[2]: data for key, data in store.objects.items() if "/part-" in key}
    assert parts
    for name, data in parts.items():
        assert digest_in_name(name) == hashlib.sha256(data).hexdigest()
        assert is_object_name(name)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        (name_with_digest("part-00001-of-00002.safetensors", DIGEST), DIGEST),
        (DIGEST, DIGEST),
        ("part-00001-of-00002.safetensors", ""),
        ("part-0", ""),
        (f"part-{DIGEST}.safetensors.x", ""),
        (f"part-{DIGEST[:-1]}.safetensors", ""),
        (f"part-{DIGEST.upper()}.safetensors", ""),
        (f"part{DIGEST}", ""),
    ],
)
def test_a_digest_in_a_name(name: str, digest: str) -> None:
    assert digest_in_name(name) == digest


def _large() -> Tensor:
    return ("U8", (1 << 20,), os.urandom(1 << 20))
