"""Trees of files as one stream of bytes: the files of a layer or of a volume, one after the other, in a fixed order.

`volume_parts` decides where a volume's stream is cut into parts, so that a version shares what did not change with the
version before it: a large file is cut by itself, and small files are gathered up to a file whose path says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import InvalidInput
from ..sizes import MIB
from .layer import CHUNK_BYTES, PART_BYTES, LayerFile, LayerManifest, LayerPart

BLOCK_BYTES = MIB
LARGE_BYTES = 4 * MIB
"""Size from which a file has parts of its own: a change of its neighbours then sends none of it again."""
GATHERED_BYTES = MIB
"""Small files gathered before a part may end: fewer and larger objects are read faster."""
GATHERED_MAX_BYTES = 16 * MIB
ENDING = 8
"""One path in so many ends a part of small files. Decided by its digest, a file more or less moves no other cut."""

ReadStream = Callable[[int, int], Iterator[bytes]]
"""Reads so many bytes of a tree's stream, from an offset on."""


def list_files(folder: Path, *, strict: bool = False) -> list[LayerFile]:
    """The files of a folder in the order of their paths. Links to files inside the folder are followed.

    `strict` refuses what else is found, where it is left out otherwise. Errors: InvalidInput, OSError.
    """
    root = folder.resolve()
    found: list[LayerFile] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in (*names, *(name for name in folders if strict)):
            path = Path(parent, name)
            if (file := _file(path, root, folder, strict=strict)) is not None:
                found.append(file)
    return sorted(found, key=lambda file: file.path.split("/"))


def _file(path: Path, root: Path, folder: Path, *, strict: bool) -> LayerFile | None:
    relative = path.relative_to(folder)
    link = path.is_symlink()
    if link and not Path(os.path.realpath(path)).is_relative_to(root):
        raise InvalidInput(f"{relative} is a link out of the folder", hint="put the file itself there")
    try:
        state = path.stat()
    except OSError as error:
        if not link:
            raise
        raise InvalidInput(f"{relative} is a link to nothing", hint="remove it, or put the file there") from error
    if stat.S_ISREG(state.st_mode):
        return LayerFile(relative.as_posix(), state.st_size, bool(state.st_mode & 0o100))
    if strict and (link or not stat.S_ISDIR(state.st_mode)):
        what = "a link to a folder" if link else "no file and no folder"
        raise InvalidInput(f"{relative} is {what}", hint="only files, folders and links to files of it are stored")
    return None


def stream_of(folder: Path, files: Sequence[LayerFile]) -> ReadStream:
    """The stream of the files below a folder."""

    def read(offset: int, size_bytes: int) -> Iterator[bytes]:
        begin, end = 0, offset + size_bytes
        for file in files:
            first, last = max(offset, begin), min(end, begin + file.size_bytes)
            if first < last:
                with (folder / file.path).open("rb") as opened:
                    opened.seek(first - begin)
                    left = last - first
                    while left and (block := opened.read(min(BLOCK_BYTES, left))):
                        left -= len(block)
                        yield block
            begin += file.size_bytes

    return read


def in_chunks(blocks: Iterable[bytes], size_bytes: int) -> Iterator[bytes]:
    """The same bytes in pieces of one size; the last may be shorter."""
    held = bytearray()
    for block in blocks:
        held += block
        while len(held) >= size_bytes:
            yield bytes(held[:size_bytes])
            del held[:size_bytes]
    if held:
        yield bytes(held)


def volume_parts(files: Iterable[LayerFile]) -> list[int]:
    """Sizes of the parts of a volume's stream, in its order."""
    sizes: list[int] = []
    gathered = 0
    for file in files:
        if gathered and (file.size_bytes >= LARGE_BYTES or gathered + file.size_bytes > GATHERED_MAX_BYTES):
            sizes.append(gathered)
            gathered = 0
        if file.size_bytes >= LARGE_BYTES:
            sizes += [min(PART_BYTES, file.size_bytes - at) for at in range(0, file.size_bytes, PART_BYTES)]
            continue
        gathered += file.size_bytes
        if gathered >= GATHERED_BYTES and hashlib.sha256(file.path.encode()).digest()[0] % ENDING == 0:
            sizes.append(gathered)
            gathered = 0
    return [*sizes, gathered] if gathered else sizes


def volume_manifest(
    files: list[LayerFile],
    read: ReadStream,
    checksum: Callable[[bytes], int],
    progress: Callable[[int], object] = lambda done_bytes: None,
) -> LayerManifest:
    """The manifest of a volume's files, all of which are read. `checksum` is xxh3-64.

    Errors: InvalidInput for a file that became shorter meanwhile; OSError.
    """
    parts: list[LayerPart] = []
    chunks: list[int] = []
    digests: list[str] = []
    offset = 0
    for size_bytes in volume_parts(files):
        digest = hashlib.sha256()
        found_bytes = 0
        for chunk in in_chunks(read(offset, size_bytes), CHUNK_BYTES):
            digest.update(chunk)
            chunks.append(checksum(chunk))
            digests.append(hashlib.sha256(chunk).hexdigest())
            found_bytes += len(chunk)
            progress(offset + found_bytes)
        if found_bytes != size_bytes:
            raise InvalidInput(
                f"{size_bytes - found_bytes:,} bytes are missing: a file of the folder became shorter while it was read"
            )
        parts.append(LayerPart(digest.hexdigest(), size_bytes))
        offset += size_bytes
    return LayerManifest(python="", platform="", lock="", files=files, parts=parts, chunks=chunks, digests=digests)
