"""Exports a checkpoint as plain safetensors, with the small files beside them.

The files are those that were first pushed, byte for byte: the same names, shards and headers, because the checkpoint
keeps their layout. Without a layout, or with a given shard size, new files are written: the same tensors bit for bit
under all their names, in the order of layers, with an index if there are several. Every chunk's checksum is verified
before a byte of it is written, and no file has its final name before all of them are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError, InvalidInput
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import LAYOUT_OBJECT, checkpoint_key
from fleetstart.runtime.contract.weights import token_table
from fleetstart.runtime.contract.weights.lora import is_adapter
from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry

from ..api_client import ApiClient
from .source import ADAPTER, INDEX
from .source_layout import LAYOUT_MAX_BYTES, read_layout
from .verify import Chunk, Progress, for_each_part, open_checkpoint, read_part

SHARD_MAX_BYTES = 5_000_000_000
"""Default size of a shard, as in Hugging Face's tools."""
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file of the export: `head` at its beginning, and tensors at offsets."""

    name: str
    head: bytes
    size_bytes: int
    places: tuple[tuple[int, TensorEntry], ...]


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of the checkpoint's bytes, and its place in a file."""

    begin: int
    end: int
    file: str
    file_offset: int


def export(
    server: ApiClient, checkpoint: CheckpointId, folder: Path, *, shard_max_bytes: int | None, progress: Progress
) -> list[Path]:
    """Writes the files, and returns their paths. Errors: InvalidInput if the folder is not empty; ChecksumMismatch;
    NotFound."""
    manifest = open_checkpoint(server, checkpoint)
    files = _as_pushed(server, checkpoint, manifest) if shard_max_bytes is None else None
    files = files or new_files(manifest, shard_max_bytes or SHARD_MAX_BYTES)
    claim_empty_folder(folder)
    names = [*(file.name for file in files), *_small(manifest)]
    with named_when_complete(folder, names), ExitStack() as stack:
        descriptors = {name: _created(stack, folder / (name + PARTIAL)) for name in names}
        for file in files:
            os.pwrite(descriptors[file.name], file.head, 0)
            os.ftruncate(descriptors[file.name], file.size_bytes)
        _fill(server, checkpoint, manifest, file_spans(manifest, files), descriptors, progress)
    return [folder / name for name in names]


@contextlib.contextmanager
def named_when_complete(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Gives files that are written under names with PARTIAL their own, once all of them are complete; after an error
    none is left."""
    try:
        yield
        for name in names:
            (folder / (name + PARTIAL)).replace(folder / name)
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                (folder / (name + PARTIAL)).unlink(missing_ok=True)


def _fill(
    server: ApiClient,
    checkpoint: CheckpointId,
    manifest: Manifest,
    spans: Sequence[FileSpan],
    descriptors: dict[str, int],
    progress: Progress,
) -> None:
    begins = [span.begin for span in spans]
    longest = max((span.end - span.begin for span in spans), default=0)
    total = sum(part.data_bytes for part in manifest.parts)
    done = 0
    lock = Lock()

    def write(part: Part) -> None:
        nonlocal done
        for chunk in read_part(server, checkpoint, manifest, part):
            if (bad := chunk.bad) is not None:
                raise ChecksumMismatch(
                    f"checkpoint {checkpoint[:12]}: {bad}", hint="push the weights again from where they came from"
                )
            begin = chunk.range.segment_offset
            first = bisect_right(begins, begin - longest)
            for span in spans[max(0, first - 1) : bisect_right(begins, begin + len(chunk.data))]:
                _write(descriptors[span.file], span, chunk)
            with lock:
                done += len(chunk.data)
                progress("export", done, total)

    for_each_part(manifest, write)


def _write(descriptor: int, span: FileSpan, chunk: Chunk) -> None:
    chunk_begin = chunk.range.segment_offset
    begin, end = max(span.begin, chunk_begin), min(span.end, chunk_begin + len(chunk.data))
    view = memoryview(chunk.data)[begin - chunk_begin : max(begin, end) - chunk_begin]
    offset = span.file_offset + begin - span.begin
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def file_spans(manifest: Manifest, files: Sequence[ExportFile]) -> list[FileSpan]:
    """All ranges to write, sorted by their beginning; a tensor with several names has several."""
    spans = [
        FileSpan(entry.offset, entry.offset + entry.size_bytes, file.name, file_offset)
        for file in files
        for file_offset, entry in file.places
    ]
    for name in _small(manifest):
        entry = manifest.files[name]
        spans.append(FileSpan(entry.offset, entry.offset + entry.size_bytes, name, 0))
    return sorted((span for span in spans if span.begin < span.end), key=lambda span: (span.begin, span.file))


def _small(manifest: Manifest) -> list[str]:
    """Names of the small files that were pushed; generated ones are left out."""
    return [name for name in manifest.files if name != token_table.FILE]


def _as_pushed(server: ApiClient, checkpoint: CheckpointId, manifest: Manifest) -> list[ExportFile] | None:
    """The files as they were pushed; None if the checkpoint has no layout."""
    data = server.read_object(checkpoint_key(checkpoint, LAYOUT_OBJECT), LAYOUT_MAX_BYTES)
    if data is None:
        return None
    try:
        layout, tensors = read_layout(data, manifest)
    except FleetError as error:
        raise type(error)(
            f"checkpoint {checkpoint[:12]}: {error.message}",
            hint="give --max-shard-size 5GB to have files made anew, without the layout",
        ) from error
    files = []
    for file, stored in zip(layout.files, tensors, strict=True):
        header = file.header.encode()
        head = len(header).to_bytes(8, "little") + header
        places = tuple((tensor.offset, _entry(manifest, tensor.name)) for tensor in stored)
        size_bytes = len(head) + sum(tensor.size_bytes for tensor in stored)
        files.append(ExportFile(name=file.name, head=head, size_bytes=size_bytes, places=places))
    if layout.index is not None:
        index = layout.index.encode()
        files.append(ExportFile(name=INDEX, head=index, size_bytes=len(index), places=()))
    return files


def new_files(manifest: Manifest, shard_max_bytes: int) -> list[ExportFile]:
    """New files as Hugging Face's tools would write them: one, or shards with an index."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in [*manifest.tensors, *manifest.aliases]:
        size_bytes = _entry(manifest, name).size_bytes
        if held and held + size_bytes > shard_max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size_bytes
    if len(groups) == 1:
        return [_made_file(ADAPTER if is_adapter(manifest) else "model.safetensors", groups[0], manifest)]
    shards = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    weight_map = {name: shard for shard, group in zip(shards, groups, strict=True) for name in group}
    total = sum(_entry(manifest, name).size_bytes for name in weight_map)
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    index = (json.dumps(table, indent=2) + "\n").encode()
    files = [_made_file(shard, group, manifest) for shard, group in zip(shards, groups, strict=True)]
    return [*files, ExportFile(name=INDEX, head=index, size_bytes=len(index), places=())]


def _made_file(file: str, names: Sequence[str], manifest: Manifest) -> ExportFile:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: list[tuple[int, TensorEntry]] = []
    end = 0
    for name in names:
        entry = _entry(manifest, name)
        offsets = [end, end + entry.size_bytes]
        table[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        begins.append((end, entry))
        end += entry.size_bytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    places = tuple((len(head) + begin, entry) for begin, entry in begins)
    return ExportFile(name=file, head=head, size_bytes=len(head) + end, places=places)


def _entry(manifest: Manifest, name: str) -> TensorEntry:
    return manifest.tensors[manifest.aliases.get(name, name)]


def claim_empty_folder(folder: Path) -> None:
    """Makes a folder to write to. Errors: InvalidInput if it is there and not empty, or cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to: {error.strerror}") from error
    if taken is not None:
        raise InvalidInput(
            f"{folder} is not empty: {taken.name} is there", hint="name an empty folder, or one that does not exist"
        )


def _created(stack: ExitStack, path: Path) -> int:
    return stack.enter_context(path.open("xb", buffering=0)).fileno()
