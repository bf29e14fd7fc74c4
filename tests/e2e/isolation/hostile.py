"""Bundles and layers that try to get out when they are unpacked: refused for a function of each isolation.

A deploy of `fs` makes none of them, so they are sent as an attacker with a key would: over the API, and to the store.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fleetstart.runtime.contract.function.layer import LayerFile, LayerManifest, layer_id, own_platform, own_python
from tests.e2e.systems import System
from tests.prefetcher.hostile_bundles import HOSTILE, tar_bomb
from tests.prefetcher.layer_store import put_layer
from tests.prefetcher.nodes import Store, tar_of

TRICKS = (
    "absolute",
    "parent",
    "symlink out",
    "write through a symlink",
    "hard link",
    "character device",
    "block device",
)
BUNDLES = (*TRICKS, "a tar bomb")
LAYERS = ("../evil.py", "/etc/evil.py", "a/../../evil.py")
GOOD = b"import heavy\ndef answers() -> str:\n    return heavy.WORD\n"


def _deploy(system: System, name: str, isolation: str, bundle: bytes, **fields: Any) -> httpx.Response:
    digest = hashlib.sha256(bundle).hexdigest()
    system.http.put(f"/api/v1/objects/bundles/{digest}", content=bundle).raise_for_status()
    spec = {"name": name, "bundle": digest, "entry": "handler:answers", "isolation": isolation, **fields}
    return system.http.post("/api/v1/functions", params={"probe": "false"}, json={**spec, "memory_bytes": 64 << 20})


def assert_a_bundle_is_refused(system: System, isolation: str, kind: str) -> None:
    data = tar_bomb() if kind == "a tar bomb" else HOSTILE[kind]
    name = f"hostile-{isolation}"
    assert _deploy(system, name, isolation, data).status_code == 200, "what is in it the node finds"
    status, error = system.failed(name, timeout_s=60)
    assert (status, error.code) in ((400, "invalid_spec"), (413, "too_large")), error
    _assert_nothing_is_outside(system)


def assert_a_layer_is_refused(system: System, isolation: str, path: str) -> None:
    """By the deploy; and by the node if it is put in the place of a good one, after the deploy."""
    name, store = f"layered-{isolation}", Store(system.home / "store")
    layer = put_layer(store, {"heavy.py": b"WORD = 'good'\n", "nonce.py": path.encode()})
    evil = LayerManifest(
        python=own_python(), platform=own_platform(), lock="", files=[LayerFile(path, 0)], parts=[], chunks=[]
    )
    data = msgspec.json.encode(evil)
    store.put(f"layers/{layer_id(data)}/manifest.json", data)
    refused = _deploy(system, name, isolation, tar_of({"handler.py": GOOD}), layer=layer_id(data))
    assert (refused.status_code, "not allowed" in refused.text) == (400, True), refused.text
    assert _deploy(system, name, isolation, tar_of({"handler.py": GOOD}), layer=layer).status_code == 200
    store.put(f"layers/{layer}/manifest.json", data)
    status, error = system.failed(name, timeout_s=60)
    assert (status, error.code) == (400, "layer_invalid"), error
    _assert_nothing_is_outside(system)


def _assert_nothing_is_outside(system: System) -> None:
    # Workers that end meanwhile take their folders along, which `walk` passes over and `rglob` does not.
    found = [name for _, folders, files in os.walk(system.root) for name in (*folders, *files)]
    assert not [name for name in found if name.startswith("evil")]
    assert not list(Path("/etc").glob("evil*"))
