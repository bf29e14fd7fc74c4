"""Layers in the store of a test, with small parts and chunks."""

from __future__ import annotations

import hashlib

import xxhash

from fleetstart.runtime.contract.function.layer import (
    LayerFile,
    LayerManifest,
    layer_bytes,
    layer_id,
    own_platform,
    own_python,
    parts_of,
)
from fleetstart.runtime.contract.ids import LayerId
from tests.prefetcher.nodes import Store

CHUNK = 4096


def put_layer(store: Store, files: dict[str, bytes], *, python: str = "", digests: list[str] | None = None) -> LayerId:
    """`digests`: others than those of the chunks."""
    names = sorted(files, key=lambda name: name.split("/"))
    stream = b"".join(files[name] for name in names)
    manifest = LayerManifest(
        python=python or own_python(),
        platform=own_platform(),
        lock="",
        chunk_bytes=CHUNK,
        files=[LayerFile(name, len(files[name]), name.endswith("run")) for name in names],
        parts=parts_of(len(stream), 2 * CHUNK),
        digests=digests
        if digests is not None
        else [hashlib.sha256(stream[at : at + CHUNK]).hexdigest() for at in range(0, len(stream), CHUNK)],
        chunks=[xxhash.xxh3_64_intdigest(stream[at : at + CHUNK]) for at in range(0, len(stream), CHUNK)],
    )
    data = layer_bytes(manifest)
    layer = layer_id(data)
    at = 0
    for part in manifest.parts:
        store.put(f"layers/{layer}/{part.object}", stream[at : at + part.size_bytes])
        at += part.size_bytes
    store.put(f"layers/{layer}/manifest.json", data)
    return layer
