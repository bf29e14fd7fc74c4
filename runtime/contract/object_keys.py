"""Keys of objects in the object store, and the check that a key is valid.

| key | holds | written by |
| --- | --- | --- |
| bundles/{sha256} | a function's code, as a tar | a deploy |
| checkpoints/{id}/{object} | a manifest, or a part of the weights | a deploy |
| ledger/{number} | a segment of the ledger | the scheduler |
| audit/{name} | a segment of the audit log | the scheduler |
| invocations/{id}/{object} | the request of a stored invocation, and its answers | gateways |
| idempotency/{digest}/{owner} | a large answer of an idempotent call | gateways |
| relay/{pipeline}/{link}/{number} | activations between stages that cannot connect | nodes |

Callers of the API may name the first two and no others.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .ids import BundleId, CheckpointId

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

BUNDLES = "bundles/"
CHECKPOINTS = "checkpoints/"
RELAY = "relay/"


class CheckpointKey(NamedTuple):
    """An object of a checkpoint: its manifest, a part, or the layout of its source files."""

    checkpoint: CheckpointId
    object: str


def is_digest(text: str) -> bool:
    """Whether the text can be the id of a bundle or a checkpoint: a sha256 in hex."""
    return _DIGEST.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Whether the text can be the name of an object of a checkpoint."""
    return _OBJECT.fullmatch(text) is not None


def is_key(key: str) -> bool:
    """Whether a key stays inside the store: a relative path of named parts, none of which leads upward."""
    return "\0" not in key and all(part not in ("", ".", "..") for part in key.split("/"))


def bundle_key(bundle: BundleId) -> str:
    """The key of a bundle's tar."""
    return f"{BUNDLES}{bundle}"


def checkpoint_key(checkpoint: CheckpointId, name: str) -> str:
    """The key of one of a checkpoint's objects."""
    return f"{CHECKPOINTS}{checkpoint}/{name}"


def parse_key(key: str) -> BundleId | CheckpointKey | None:
    """Parses the key of a bundle or a checkpoint's object; None for every other text."""
    folder, _, rest = key.partition("/")
    if f"{folder}/" == BUNDLES:
        return BundleId(rest) if is_digest(rest) else None
    checkpoint, _, name = rest.partition("/")
    if f"{folder}/" == CHECKPOINTS and is_digest(checkpoint) and is_object_name(name):
        return CheckpointKey(CheckpointId(checkpoint), name)
    return None
