"""Checkpoints to try: manifests and their objects."""

from __future__ import annotations

from typing import Any

from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry, checkpoint_id

PART = b"h" * 64 + b"d" * 4096
NOW_MS = 1_800_000_000_000


def manifest(seed: int = 1, **fields: Any) -> Manifest:
    return Manifest(
        chunk_bytes=4096,
        total_bytes=4096,
        parts=[Part("part-0", 64, 4096, 0)],
        chunks=[seed],
        **{"tensors": {"w": TensorEntry(0, 4032, "U8", (4032,), 0)}, **fields},
    )


def objects_of(data: bytes) -> dict[str, bytes]:
    """What is uploaded for a manifest, itself last."""
    folder = f"checkpoints/{checkpoint_id(data)}"
    return {f"{folder}/part-0": PART, f"{folder}/manifest.json": data}
