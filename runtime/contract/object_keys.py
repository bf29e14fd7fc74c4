"""Keys of objects in the object store, and the check that a key is valid.

| key | holds | written by |
| --- | --- | --- |
| bundles/{sha256} | a function's code, as a tar | a deploy |
| checkpoints/{id}/{object} | a manifest, or a part of the weights | a deploy |
| layers/{id}/{object} | a layer's manifest, or a part of its packages | a deploy |
| volumes/{id}/manifest.json | the manifest of a volume's version | `fs volume put`, nodes |
| parts/{sha256} | a part of volumes' files | `fs volume put`, nodes |
| ledger/{number} | a segment of the ledger | the scheduler |
| ledger-sums/1/{segments}/{number} | the sum of that many segments from a number on | the scheduler |
| audit/{name} | a segment of the audit log | the scheduler |
| invocations/{id}/{object} | the request of a stored invocation, and its answers | gateways |
| idempotency/{digest}/{owner} | a large answer of an idempotent call | gateways |
| probe/link | bytes by which nodes measure their links | controllers |
| relay/{pipeline}/{link}/{number} | activations between stages that cannot connect | nodes |

Callers of the API may name the first five and no others.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .ids import BundleId, CheckpointId, LayerId, PartId
from .sizes import MIB

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAMED_BY_DIGEST = re.compile(r"(?:.+-)?([0-9a-f]{64})(?:\.safetensors)?")

BUNDLES = "bundles/"
CHECKPOINTS = "checkpoints/"
LAYERS = "layers/"
VOLUMES = "volumes/"
PARTS = "parts/"
RELAY = "relay/"
LINK_PROBE = "probe/link"
LINK_PROBE_BYTES = 8 * MIB
"""What a node reads when it comes up: a third of a second at 200 Mbit/s."""
VOLUME_MANIFEST = "manifest.json"
LAYOUT_OBJECT = "layout.json.gz"
"""Layout of a checkpoint's source files, beside its parts."""


class CheckpointKey(NamedTuple):
    """An object of a checkpoint: its manifest, a part, or the layout of its source files."""

    checkpoint: CheckpointId
    object: str


class LayerKey(NamedTuple):
    """An object of a layer: its manifest, or a part."""

    layer: LayerId
    object: str


class VolumeKey(NamedTuple):
    """The manifest of a volume's version."""

    tree: LayerId
    object: str


def is_digest(text: str) -> bool:
    """Checks whether the text can be the id of a bundle, a checkpoint or a layer: a sha256 in hex."""
    return _DIGEST.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Checks whether the text can be the name of an object of a checkpoint."""
    return _OBJECT.fullmatch(text) is not None


def name_with_digest(name: str, digest: str) -> str:
    """The name of a part, with the SHA-256 of its bytes: part-00001-of-00002-{digest}.safetensors."""
    return f"{name.removesuffix('.safetensors')}-{digest}.safetensors"


def digest_in_name(name: str) -> str:
    """The SHA-256 that an object's name demands of its bytes; empty if it has none, as parts of older checkpoints."""
    match = _NAMED_BY_DIGEST.fullmatch(name)
    return match[1] if match is not None else ""


def is_key(key: str) -> bool:
    """Checks whether a key stays inside the store: a relative path of named parts, none of which leads upward."""
    return "\0" not in key and all(part not in ("", ".", "..") for part in key.split("/"))


def bundle_key(bundle: BundleId) -> str:
    """The key of a bundle's tar."""
    return f"{BUNDLES}{bundle}"


def checkpoint_key(checkpoint: CheckpointId, name: str) -> str:
    """The key of one of a checkpoint's objects."""
    return f"{CHECKPOINTS}{checkpoint}/{name}"


def layer_key(layer: LayerId, name: str) -> str:
    """The key of one of a layer's objects."""
    return f"{LAYERS}{layer}/{name}"


def volume_key(tree: LayerId, name: str) -> str:
    """The key of the manifest of a volume's version, or of one of its parts, which is no object below it."""
    return f"{PARTS}{name}" if is_digest(name) else f"{VOLUMES}{tree}/{name}"


def parse_key(key: str) -> BundleId | PartId | CheckpointKey | LayerKey | VolumeKey | None:
    """Parses the key of a bundle, a part of a volume, or an object of a checkpoint, a layer or a volume; None for every
    other text."""
    folder, _, rest = key.partition("/")
    if f"{folder}/" in (BUNDLES, PARTS):
        return (BundleId(rest) if f"{folder}/" == BUNDLES else PartId(rest)) if is_digest(rest) else None
    digest, _, name = rest.partition("/")
    if not is_digest(digest) or not is_object_name(name):
        return None
    if f"{folder}/" == CHECKPOINTS:
        return CheckpointKey(CheckpointId(digest), name)
    if f"{folder}/" == LAYERS:
        return LayerKey(LayerId(digest), name)
    if f"{folder}/" == VOLUMES and name == VOLUME_MANIFEST:
        return VolumeKey(LayerId(digest), name)
    return None
