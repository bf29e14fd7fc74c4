"""Secrets at rest and on their way: what opens, what does not, and what is never told."""

from __future__ import annotations

import os
import stat
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.auth.secret_encryption import SecretCipher, SecretCipherError, key_id
from fleetstart.controller.auth.secret_sealing import seal_values
from fleetstart.controller.state.access_records import SecretRecord
from fleetstart.prefetcher.workers.secrets import SecretDecryptor
from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.sealed_secrets import Sealed, bound_to

VALUE = "hf_correct horse ✓\nbattery"


def closed(cipher: SecretCipher, *, project: str = "ml", name: str = "HF_TOKEN") -> SecretRecord:
    box, master = cipher.encrypt(project, name, VALUE)
    return SecretRecord(
        name=name, project=project, box=box, master=master, size_bytes=1, created_unix_ms=1, updated_unix_ms=1,
        updated_by="local",
    )  # fmt: skip


def fresh_key() -> str:
    return b64encode(os.urandom(32)).decode()


def test_what_was_closed_opens_after_a_restart_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    record = closed(SecretCipher(tmp_path, ""))
    assert VALUE[:5].encode() not in msgspec.json.encode(record)
    assert SecretCipher(tmp_path, "").decrypt(record) == VALUE
    assert stat.S_IMODE((tmp_path / "master.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["master.key"]
    assert closed(SecretCipher(tmp_path, "")).box != record.box, "equal values do not look equal"


def test_what_was_moved_changed_or_needs_another_key_does_not_open(tmp_path: Path) -> None:
    cipher = SecretCipher(tmp_path, "")
    record = closed(cipher)
    for broken in (
        msgspec.structs.replace(record, name="OTHER"),
        msgspec.structs.replace(record, project="default"),
        msgspec.structs.replace(record, box=record.box[:-8] + "AAAAAAA="),
        msgspec.structs.replace(record, box="?"),
        msgspec.structs.replace(record, box=""),
    ):
        with pytest.raises(SecretCipherError, match="does not decrypt"):
            cipher.decrypt(broken)
    with pytest.raises(SecretCipherError, match=f"encrypted with master key {record.master}"):
        SecretCipher(tmp_path / "elsewhere", fresh_key()).decrypt(record)


def test_master_keys_are_changed_without_losing_anything(tmp_path: Path) -> None:
    cipher = SecretCipher(tmp_path, "")
    old = closed(cipher)
    master = cipher.add_master_key()
    assert master != old.master
    new = closed(cipher)
    assert (new.master, cipher.decrypt(old), cipher.decrypt(new)) == (master, VALUE, VALUE)
    assert SecretCipher(tmp_path, "").decrypt(old) == VALUE, "both are kept until the old one is not needed"
    cipher.drop_old_keys()
    assert SecretCipher(tmp_path, "").decrypt(new) == VALUE
    with pytest.raises(SecretCipherError):
        SecretCipher(tmp_path, "").decrypt(old)
    first, second = fresh_key(), fresh_key()
    before = closed(SecretCipher(tmp_path, first))
    both = SecretCipher(tmp_path, f"{second},{first}")
    assert both.decrypt(before) == VALUE
    assert both.add_master_key() == closed(both).master != before.master


def test_controllers_of_one_home_that_make_the_first_key_at_once_have_the_same(tmp_path: Path) -> None:
    for number in range(20):
        home = tmp_path / str(number)
        home.mkdir()
        ciphers = [SecretCipher(home, "") for _ in range(6)]
        together = threading.Barrier(len(ciphers))

        def first_secret(cipher: SecretCipher, together: threading.Barrier = together) -> SecretRecord:
            together.wait()
            return closed(cipher)

        with ThreadPoolExecutor(len(ciphers)) as pool:
            records = list(pool.map(first_secret, ciphers))
        assert [SecretCipher(home, "").decrypt(record) for record in records] == [VALUE] * len(ciphers)


def test_a_rekey_drops_no_key_of_another_rekey_that_came_between(tmp_path: Path) -> None:
    one, other = SecretCipher(tmp_path, ""), SecretCipher(tmp_path, "")
    before = closed(one)
    one.add_master_key()
    between = closed(one)
    latest = other.add_master_key()
    one.drop_old_keys({between.master})
    assert (one.knows(before.master), one.knows(between.master), one.knows(latest)) == (False, True, True)
    assert closed(one).master == latest
    assert SecretCipher(tmp_path, "").decrypt(between) == VALUE
    with ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda _: SecretCipher(tmp_path, "").add_master_key(), range(8)))
    assert all(one.knows(master) for master in added), "none takes another's place"


@pytest.mark.parametrize("text", ["x", "AAAA", ",", "=" * 44, "ü"])
def test_what_is_no_master_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(SecretCipherError, match="FS_MASTER_KEY is no master key"):
        SecretCipher(tmp_path, text)
    (tmp_path / "master.key").write_text(text)
    with pytest.raises(SecretCipherError, match="is no master key"):
        closed(SecretCipher(tmp_path, ""))
    assert (tmp_path / "master.key").read_text() == text, "what is there is not overwritten"


def test_key_ids_tell_nothing_of_the_key() -> None:
    key = os.urandom(32)
    assert len(key_id(key)) == 8
    assert key_id(key) not in key.hex()


def order(
    decryptor: SecretDecryptor, values: dict[str, str], *, wanted: list[str] | None = None, epoch: str = "e1"
) -> WorkerOrder:
    worker, node = WorkerId("w1"), NodeId("n1")
    spec = FunctionSpec(
        name=FunctionName("chat"), bundle=BundleId("b"), entry="handler:run",
        secrets=list(values) if wanted is None else wanted,
    )  # fmt: skip
    sealed = seal_values(values, decryptor.public_key, bound_to(worker, node, epoch))
    return WorkerOrder(
        worker=worker, node=node, epoch="e1", version=Version(1), spec=spec, ordered_unix_ns=1, sealed=sealed
    )


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,10}", fullmatch=True), st.text(max_size=200), max_size=4))
def test_what_is_sealed_for_a_node_opens_there(values: dict[str, str]) -> None:
    decryptor = SecretDecryptor()
    sent = order(decryptor, values)
    assert decryptor.decrypt(msgspec.json.decode(msgspec.json.encode(sent), type=WorkerOrder)) == values


def test_what_is_for_another_worker_node_or_epoch_does_not_open() -> None:
    decryptor = SecretDecryptor()
    good = order(decryptor, {"TOKEN": VALUE})
    assert VALUE.encode() not in msgspec.json.encode(good)
    assert decryptor.decrypt(good) == {"TOKEN": VALUE}
    sealed = good.sealed
    assert sealed is not None
    bad = [
        msgspec.structs.replace(good, worker=WorkerId("w2")),
        msgspec.structs.replace(good, node=NodeId("n2")),
        order(decryptor, {"TOKEN": VALUE}, epoch="e2"),
        msgspec.structs.replace(good, sealed=None),
        msgspec.structs.replace(good, sealed=Sealed(error="secret TOKEN is not there any more")),
        msgspec.structs.replace(good, sealed=Sealed(public="?", box=sealed.box)),
        msgspec.structs.replace(good, sealed=Sealed(public=sealed.public, box="AAAA")),
        msgspec.structs.replace(good, sealed=Sealed(public=b64encode(bytes(32)).decode(), box=sealed.box)),
        order(decryptor, {"TOKEN": VALUE}, wanted=["TOKEN", "OTHER"]),
    ]
    for one in bad:
        with pytest.raises(StartFailed) as caught:
            decryptor.decrypt(one)
        assert VALUE not in str(caught.value)
    with pytest.raises(StartFailed):
        SecretDecryptor().decrypt(good)


@pytest.mark.parametrize("key", ["", "?", "AAAA", b64encode(bytes(32)).decode()])
def test_what_is_no_public_key_is_not_sealed_for(key: str) -> None:
    with pytest.raises(StartFailed):
        seal_values({"TOKEN": VALUE}, key, b"")
