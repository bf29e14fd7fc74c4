"""A folder with the small files of a checkpoint, for libraries that read paths: config.json, tokenizer.json."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

FILE_MODE = 0o444
FOLDER_MODE = 0o555


def write_folder(names: Iterable[str], read: Callable[[str], memoryview]) -> Path:
    """Writes the files into a new read-only folder in the worker's temporary memory. Waits for each file."""
    folder = Path(tempfile.mkdtemp(prefix="weights-"))
    for name in names:
        path = folder / name
        path.write_bytes(read(name))
        path.chmod(FILE_MODE)
    folder.chmod(FOLDER_MODE)
    return folder
