"""Wheels that a test makes, in a folder that pip and uv take as their only index."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

OFFLINE = {"UV_NO_INDEX": "1", "UV_OFFLINE": "1"}


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes | str], *, requires: Sequence[str] = ()
) -> Path:
    """Writes a pure wheel into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    contents = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = []
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    contents[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def index(folder: Path) -> dict[str, str]:
    """Variables by which builds find their packages in the folder, and nowhere else."""
    return {**OFFLINE, "UV_FIND_LINKS": str(folder)}
