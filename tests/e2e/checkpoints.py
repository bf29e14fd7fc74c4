"""Weights on disk, good and bad, small enough to be written in a moment."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path

TENSORS = 8
TENSOR_BYTES = 256 * 1024


def write_safetensors(path: Path, *, tensors: int = TENSORS, tensor_bytes: int = TENSOR_BYTES) -> Path:
    """`layers.N.weight`, each of F32 and filled with N."""
    import struct

    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"layers.{number}.weight" for number in range(tensors)]
    header = {
        name: {
            "dtype": "F32",
            "shape": [tensor_bytes // 4],
            "data_offsets": [at * tensor_bytes, (at + 1) * tensor_bytes],
        }
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number in range(tensors):
            out.write(struct.pack("<f", float(number)) * (tensor_bytes // 4))
    return path


class Boom:
    """Payload of a hostile pickle: if it were opened, this file would be made."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.evidence), "w")


def torch_zip(evidence: Path) -> bytes:
    """A checkpoint as torch.save writes it: a zip whose data.pkl is a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Boom(evidence), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(64))
    return out.getvalue()
