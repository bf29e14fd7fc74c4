"""The object store's protocol, uploads, and checks that bundles and checkpoints are complete.

Callers of the API may name only bundles and checkpoints (`contract.object_keys`), never the `ledger/`. An object is
written once: its bytes never change, and who sends others is refused. Bundles, manifests and parts have their digest
in their key, and are published only if they match. Parts of older checkpoints have none: nodes check their chunks'
checksums, which find accidents. `registry.checkpoints` lists and removes checkpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from fleetstart.runtime.contract.errors import (
    CheckpointInvalid,
    Conflict,
    InvalidInput,
    InvalidSpec,
    LayerInvalid,
    NotFound,
    StoreFailed,
    TooLarge,
    WeightsMissing,
)
from fleetstart.runtime.contract.function import layer as layers
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, LayerId
from fleetstart.runtime.contract.object_keys import (
    CheckpointKey,
    LayerKey,
    VolumeKey,
    bundle_key,
    checkpoint_key,
    digest_in_name,
    is_digest,
    layer_key,
    parse_key,
    volume_key,
)
from fleetstart.runtime.contract.weights.manifest import MANIFEST_MAX_BYTES, MANIFEST_OBJECT, Manifest, read_manifest

DIGEST_HERE_BYTES = 64 * 1024
"""Smaller blocks are digested quicker than a thread is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    key: str
    size_bytes: int
    modified_unix_ms: int


class ObjectStore(Protocol):
    """An object store. Keys from callers must have passed `check_key`. Errors: StoreFailed."""

    async def put(self, key: str, upload: Upload) -> bool:
        """Stores all bytes of the upload, published only after `upload.check()` has passed. False, and nothing is
        changed, if an equal object is there. Errors: Conflict, if another one is there."""
        ...

    async def create(self, key: str, data: bytes) -> bool:
        """Publishes a small object at once; False, and nothing is changed, if the key exists."""
        ...

    async def size(self, key: str) -> int | None:
        """The size of an object; None if there is none."""
        ...

    async def read(self, key: str, limit_bytes: int) -> bytes | None:
        """Reads a small object; None if there is none. Errors: TooLarge above the limit."""
        ...

    def read_range(self, key: str, offset: int, size_bytes: int) -> AsyncGenerator[bytes, None]:
        """Reads a range of an object; NotFound and StoreFailed are raised with the first block."""
        ...

    async def list(self, prefix: str) -> list[StoredObject]:
        """Lists all objects under a prefix that ends with a slash."""
        ...

    async def delete(self, key: str) -> None:
        """Deletes an object, if it exists."""
        ...

    async def sweep(self, older_than_s: float) -> int:
        """Removes incomplete uploads; returns their number."""
        ...


class Upload:
    """An upload, digested as it passes; `check()` compares it with the digest in its key, if there is one."""

    def __init__(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        self._key = key
        self._chunks = chunks
        self._digest = hashlib.sha256()
        self._expected = expected_digest(key)
        self.size_bytes = 0

    async def blocks(self, block_bytes: int) -> AsyncIterator[bytes]:
        """Yields the bytes in blocks of that size; the last may be shorter."""
        block = bytearray()
        async for chunk in self._chunks:
            self.size_bytes += len(chunk)
            block += chunk
            while len(block) >= block_bytes:
                yield await self._digested(bytes(block[:block_bytes]))
                del block[:block_bytes]
        if block:
            yield await self._digested(bytes(block))

    async def _digested(self, block: bytes) -> bytes:
        if len(block) < DIGEST_HERE_BYTES:
            self._digest.update(block)
        else:
            await asyncio.to_thread(self._digest.update, block)
        return block

    @property
    def digest(self) -> str:
        """SHA-256 of what has passed, in hex."""
        return self._digest.hexdigest()

    @property
    def is_named_by_digest(self) -> bool:
        return self._expected is not None

    def check(self) -> None:
        if self._expected is not None and self.digest != self._expected:
            raise InvalidInput(
                f"{self._key}: the {self.size_bytes} bytes that came have digest {self.digest[:12]}…",
                hint="the upload was cut or changed on its way: deploy again",
            )


async def is_same(store: ObjectStore, key: str, upload: Upload) -> bool:
    """True if the object in the store is what was sent once more. Errors: Conflict, if it is not and nothing tells
    which of the two is right; StoreFailed."""
    found_bytes = await store.size(key)
    if found_bytes is None:
        raise StoreFailed(f"{key} was removed while it was sent", hint="send it again")
    digest = hashlib.sha256()
    if found_bytes == upload.size_bytes:
        async for block in store.read_range(key, 0, found_bytes):
            await asyncio.to_thread(digest.update, block)
        if digest.hexdigest() == upload.digest:
            return True
    if upload.is_named_by_digest:  # it has passed `check()`: the object in the store is damaged
        return False
    raise Conflict(
        f"{key} is in the store with other bytes: {found_bytes:,}, and {upload.size_bytes:,} came; objects are written "
        "once",
        hint="if the one in the store is damaged, an admin removes it: fs weights verify ID --repair",
    )


def check_key(key: str) -> str:
    """Checks a key that a caller of the API has named. Errors: InvalidInput."""
    if parse_key(key) is None:
        raise InvalidInput(
            f"object key {key[:200]!r} is not allowed",
            hint="bundles/SHA256, checkpoints/ID/OBJECT, layers/ID/OBJECT, volumes/ID/manifest.json, parts/SHA256 are",
        )
    return key


def check_checkpoint(text: str) -> CheckpointId:
    """Checks a checkpoint's id. Errors: InvalidInput."""
    if not is_digest(text):
        raise InvalidInput(
            f"{text[:80]!r} is not a checkpoint's id", hint="64 hex digits; `fs weights ls --json` lists them in full"
        )
    return CheckpointId(text)


def expected_digest(key: str) -> str | None:
    """The sha256 in a key; None for parts of older checkpoints, of which the manifest has checksums alone."""
    named = parse_key(key)
    if isinstance(named, CheckpointKey):
        return named.checkpoint if named.object == MANIFEST_OBJECT else digest_in_name(named.object) or None
    if isinstance(named, LayerKey):
        return named.layer if named.object == MANIFEST_OBJECT else digest_in_name(named.object) or None
    return named.tree if isinstance(named, VolumeKey) else named


async def require_bundle(store: ObjectStore, name: FunctionName, bundle: BundleId) -> None:
    key = bundle_key(bundle)
    if not is_digest(bundle):
        raise InvalidSpec(f"function {name}: bundle {bundle[:80]!r} is not a sha256 in hex")
    if await store.size(key) is None:
        raise InvalidSpec(
            f"function {name}: its bundle {bundle[:12]} is not in the store",
            hint="`fs deploy` uploads it: run it again",
        )


async def require_layer(store: ObjectStore, name: FunctionName, layer: LayerId) -> layers.LayerManifest:
    """Reads the manifest of a layer that is complete in the store. Errors: InvalidSpec, LayerInvalid, naming the first
    object."""
    if not is_digest(layer):
        raise InvalidSpec(f"function {name}: layer {layer[:80]!r} is not a sha256 in hex")
    data = await store.read(layer_key(layer, MANIFEST_OBJECT), layers.MANIFEST_MAX_BYTES)
    if data is None:
        raise LayerInvalid(f"function {name}: layer {layer[:12]} is not in the store", hint=_DEPLOY_LAYER)
    return await require_layer_parts(store, layer, data)


async def require_layer_parts(store: ObjectStore, layer: LayerId, data: bytes) -> layers.LayerManifest:
    """Checks that the parts of a layer's manifest are in the store. Errors: LayerInvalid, naming the first one."""
    manifest = await asyncio.to_thread(layers.read_layer, data, layer)
    for part in manifest.parts:
        await _require_part(store, f"layer {layer[:12]}", part, layer_key(layer, part.object), _DEPLOY_LAYER)
    return manifest


async def require_volume(store: ObjectStore, tree: LayerId) -> layers.LayerManifest:
    """Reads the manifest of a version of a volume that is in the store whole. Errors: InvalidInput, LayerInvalid."""
    if not is_digest(tree):
        raise InvalidInput(f"{tree[:80]!r} is not the id of a volume's manifest")
    data = await store.read(volume_key(tree, MANIFEST_OBJECT), layers.MANIFEST_MAX_BYTES)
    if data is None:
        raise LayerInvalid(f"the manifest {tree[:12]} is not in the store", hint=_PUT_VOLUME)
    return await require_volume_parts(store, tree, data)


async def require_volume_parts(store: ObjectStore, tree: LayerId, data: bytes) -> layers.LayerManifest:
    """Checks that the parts of a volume's manifest are in the store. Errors: LayerInvalid, naming the first one."""
    manifest = await asyncio.to_thread(layers.read_layer, data, tree)
    sizes = {part.object: part for part in manifest.parts}
    for part in sizes.values():
        if not is_digest(part.object):
            raise LayerInvalid(f"volume {tree[:12]}: {part.object} is not named by its digest", hint=_PUT_VOLUME)
        await _require_part(store, f"volume {tree[:12]}", part, volume_key(tree, part.object), _PUT_VOLUME)
    return manifest


async def _require_part(store: ObjectStore, what: str, part: layers.LayerPart, key: str, hint: str) -> None:
    found = await store.size(key)
    if found != part.size_bytes:
        state = "is not in the store" if found is None else f"has {found:,} bytes, {part.size_bytes:,} expected"
        raise LayerInvalid(f"{part.object} of {what} {state}", hint=hint)


_PUT_VOLUME = "`fs volume put` sends what the store lacks: run it again"
_DEPLOY_LAYER = "`fs deploy` sends what the store lacks: run it again"


async def require_checkpoint(store: ObjectStore, name: FunctionName, checkpoint: CheckpointId) -> Manifest:
    """Reads the manifest of a complete checkpoint. Errors: WeightsMissing, CheckpointInvalid, naming the first
    object."""
    key = checkpoint_key(checkpoint, MANIFEST_OBJECT)
    if not is_digest(checkpoint):
        raise InvalidSpec(f"function {name}: weights {checkpoint[:80]!r} are not a checkpoint's id")
    hint = f"`fs deploy` uploads the weights of {name}: run it again"
    data = await store.read(key, MANIFEST_MAX_BYTES)
    if data is None:
        raise WeightsMissing(f"function {name}: checkpoint {checkpoint[:12]} is not in the store", hint=hint)
    manifest = await asyncio.to_thread(read_manifest, data, checkpoint)
    for part in manifest.parts:
        expected = part.header_bytes + part.data_bytes
        found = await store.size(checkpoint_key(checkpoint, part.object))
        if found is None:
            raise WeightsMissing(
                f"function {name}: {part.object} of checkpoint {checkpoint[:12]} is not in the store", hint=hint
            )
        if found != expected:
            raise CheckpointInvalid(
                f"function {name}: {part.object} of checkpoint {checkpoint[:12]} has {found:,} bytes in the store, "
                f"its manifest says {expected:,}",
                hint=hint,
            )
    return manifest


async def read_file(
    store: ObjectStore, checkpoint: CheckpointId, manifest: Manifest, name: str, limit_bytes: int
) -> bytes:
    """Reads a small file of a checkpoint. Its bytes are not checked against the chunks' checksums."""
    entry = manifest.files[name]
    if entry.size_bytes > limit_bytes:
        raise TooLarge(
            f"{name} of checkpoint {checkpoint[:12]} has {entry.size_bytes:,} bytes, {limit_bytes:,} at most"
        )
    for part in manifest.parts:
        begin = entry.offset - part.segment_offset
        if 0 <= begin < part.data_bytes:
            blocks = store.read_range(
                checkpoint_key(checkpoint, part.object), part.header_bytes + begin, entry.size_bytes
            )
            return b"".join([block async for block in blocks])
    return b""


def not_found(key: str) -> NotFound:
    return NotFound(f"{key} is not in the store")
