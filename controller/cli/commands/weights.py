"""`fs weights`: publishes, lists, verifies, exports and removes checkpoints in the store, and quantises models."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidInput, NotFound
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.sizes import parse_size
from fleetstart.runtime.contract.store_url import is_s3

from ...schemas.functions import CheckpointInfo, UploadInfo
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..completions import files
from ..home import HomeLayout
from ..progress import ProgressBar
from ..quantization.quantized_copy import write_quantized
from ..root import verb
from ..weights.export import export
from ..weights.local_files import FileList, LocalFolder
from ..weights.publish import publish_source
from ..weights.resolve import SHORT, find_checkpoint
from ..weights.source import Source, read_folder, read_source
from ..weights.verify import CorruptRange, remove_parts, verify


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Checkpoints in the store. Each has --json, and takes an ID by its first digits or a function's name."""


@command.command
@click.argument("sources", nargs=-1, required=True, metavar="DIR|FILE...|s3://BUCKET/PREFIX", shell_complete=files)
@verb()
@click.pass_obj
def push(home: Path, *, sources: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Send weights to the store; prints the checkpoint's id.

    A folder in the style of Hugging Face (model.safetensors, or shards with their index), a LoRA adapter in PEFT's
    format, or single files. What the store has already is not sent again, so a push that broke goes on where it was.
    """
    source = _source(sources)
    if source.adapter:
        output.message("a LoRA adapter, to be used on top of other weights")
    started_s = time.monotonic()
    with ApiClient(find_server(url, home)) as server, ProgressBar("push", live=output.is_terminal()) as bar:
        published = publish_source(source, server, cache=HomeLayout(home).cache, progress=bar)
    sent = (
        f"{output.format_size(published.uploaded_bytes)} sent" if published.uploaded_bytes else "in the store already"
    )
    output.message(
        f"weights {output.format_size(published.weight_bytes)}, {sent}, in {time.monotonic() - started_s:.1f} s"
    )
    if as_json:
        output.json_data(
            {
                "id": published.id,
                "weight_bytes": published.weight_bytes,
                "uploaded_bytes": published.uploaded_bytes,
                "adapter": source.adapter,
            }
        )
    else:
        output.data(published.id)


def _source(sources: Sequence[str]) -> Source:
    remote = [source for source in sources if is_s3(source)]
    if remote and len(sources) > 1:
        raise click.UsageError(f"{remote[0]} is pushed alone: one bucket and prefix, or files of this machine")
    if remote:
        from ..weights.s3_files import read_s3  # late: boto3 takes a third of a second

        return read_s3(remote[0])
    paths = [Path(source) for source in sources]
    return read_source(paths[0]) if len(paths) == 1 else read_folder(FileList(paths))


@command.command
@click.option("--all", "unfinished", is_flag=True, help="Also uploads that have not ended.")
@verb()
@click.pass_obj
def ls(home: Path, *, unfinished: bool, url: str | None, as_json: bool) -> None:
    """List checkpoints: size, contents, age, the nodes that have them in memory, and the functions that use them."""
    with ApiClient(find_server(url, home)) as server:
        checkpoints = server.get("/api/v1/checkpoints", list[CheckpointInfo], unfinished=int(unfinished))
    if as_json:
        output.json_data(checkpoints)
    elif checkpoints:
        output.data(checkpoints_table(checkpoints, now_s=time.time()))
        if unprotected := [info.id[:SHORT] for info in checkpoints if info.complete and not info.protected]:
            output.message(
                f"not protected against forgery, because they have no digests: {', '.join(unprotected)}; "
                "push the same weights with this release, and deploy with the new ID"
            )
    else:
        output.message("no weights are in the store yet: fs weights push FOLDER")


def checkpoints_table(checkpoints: Iterable[CheckpointInfo], *, now_s: float) -> str:
    rows = [
        (
            info.id[:SHORT],
            "adapter" if info.adapter else "model",
            output.format_size(info.weight_bytes),
            str(info.tensors),
            str(info.files),
            str(info.parts),
            output.format_age(max(0.0, now_s - info.created_unix_ms / 1000)),
            _in_memory(info),
            ", ".join(info.used_by) or "-" if info.complete else f"incomplete: {info.problem}",
        )
        for info in checkpoints
    ]
    headings = ("ID", "KIND", "SIZE", "TENSORS", "FILES", "PARTS", "AGE", "IN MEMORY", "USED BY")
    return output.table(headings, rows, right=frozenset({2, 3, 4, 5, 6}))


@command.command
@verb()
@click.pass_obj
def uploads(home: Path, *, url: str | None, as_json: bool) -> None:
    """List uploads that have begun and are not published: whose, how much has come, and when they end."""
    with ApiClient(find_server(url, home)) as server:
        found = server.get("/api/v1/uploads", list[UploadInfo])
    if as_json:
        output.json_data(found)
    elif found:
        output.data(uploads_table(found, now_s=time.time()))
    else:
        output.message("no upload is open")


def uploads_table(found: Iterable[UploadInfo], *, now_s: float) -> str:
    rows = [
        (
            info.checkpoint[:SHORT],
            info.project,
            info.key,
            f"{output.format_size(info.stored_bytes)} of {output.format_size(info.object_bytes)}",
            f"{info.stored} of {info.objects}",
            output.format_age(max(0.0, now_s - info.begun_unix_ms / 1000)),
            output.format_age(max(0.0, info.ends_unix_ms / 1000 - now_s)),
        )
        for info in found
    ]
    return output.table(("ID", "PROJECT", "KEY", "SIZE", "OBJECTS", "AGE", "ENDS IN"), rows, right=frozenset({3, 4, 5}))


@command.command
@click.argument("name", metavar="ID")
@click.option("--project", help="Whose upload, if several projects send the same weights.")
@verb()
@click.pass_obj
def abort(home: Path, *, name: str, project: str | None, url: str | None, as_json: bool) -> None:
    """End an upload, and delete its parts unless another upload or a published checkpoint names them."""
    with ApiClient(find_server(url, home)) as server:
        chosen = choose_upload(name, project, server.get("/api/v1/uploads", list[UploadInfo]))
        info = server.delete(f"/api/v1/uploads/{quote(chosen.id, safe='')}", UploadInfo)
    output.message(
        f"the upload of {info.checkpoint[:SHORT]} is aborted, {output.format_size(info.stored_bytes)} had come"
    )
    if as_json:
        output.json_data(info)


def choose_upload(text: str, project: str | None, found: Sequence[UploadInfo]) -> UploadInfo:
    """The upload whose checkpoint's id begins with a text. Errors: NotFound; InvalidInput for several."""
    wanted = text.strip().lower()
    matching = [info for info in found if wanted and info.id.partition(":")[2].startswith(wanted)]
    matching = [info for info in matching if project in (None, info.project)]
    if len(matching) > 1:
        alike = ", ".join(f"{info.checkpoint[:SHORT]} of {info.project}" for info in matching[:5])
        raise InvalidInput(f"{text[:80]!r} is several uploads: {alike}", hint="write more digits, or --project")
    if not matching:
        raise NotFound(f"no upload {text[:80]!r} is open", hint="`fs weights uploads` lists those that are")
    return matching[0]


def _in_memory(info: CheckpointInfo) -> str:
    """On how many nodes it is, and where a copy is kept."""
    here = f"{len(info.in_memory)} node{'s' * (len(info.in_memory) != 1)}" if info.in_memory else "-"
    return f"{here}, kept on {', '.join(info.copies)}" if info.copies else here


@command.command("verify")
@click.argument("name", metavar="ID|all")
@click.option("--repair", is_flag=True, help="Remove damaged parts, so that a push of the same weights sends them.")
@verb()
@click.pass_obj
def verify_(home: Path, *, name: str, repair: bool, url: str | None, as_json: bool) -> int:
    """Read all of a checkpoint again and check it; exit code 1 and the bad chunk's place if it is not whole.

    Objects in the store are written once. --repair needs an admin's key without limits, and is in the audit log.
    """
    results: list[dict[str, Any]] = []
    with ApiClient(find_server(url, home)) as server:
        if name == "all":
            wanted = [info.id for info in server.get("/api/v1/checkpoints", list[CheckpointInfo])]
        else:
            wanted = [find_checkpoint(server, name).id]
        for checkpoint in wanted:
            results.append(_verified(server, checkpoint, repair=repair))
            if results[-1]["ok"] and not as_json:
                output.data(f"{checkpoint[:SHORT]} is whole")
    failed = any(not result["ok"] for result in results)
    if as_json:
        output.json_data(results)
    return output.FAILED if failed else output.OK


def _verified(server: ApiClient, checkpoint: CheckpointId, *, repair: bool) -> dict[str, Any]:
    bad: list[CorruptRange] = []
    problem = ""
    try:
        with ProgressBar(f"verify {checkpoint[:SHORT]}", live=output.is_terminal()) as bar:
            bad = verify(server, checkpoint, bar)
    except CheckpointInvalid as error:
        problem = error.message
    for wrong in [problem] if problem else [str(one) for one in bad]:
        output.message(f"{checkpoint[:SHORT]} is damaged: {wrong}")
    removed = remove_parts(server, checkpoint, bad) if repair else []
    if removed:
        output.message(f"{checkpoint[:SHORT]}: removed {', '.join(removed)}; now push the same weights again")
    return {"id": checkpoint, "ok": not bad and not problem, "problem": problem, "bad": bad, "removed": removed}


@command.command
@click.argument("name", metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@verb()
@click.pass_obj
def rm(home: Path, *, name: str, yes: bool, url: str | None, as_json: bool) -> None:
    """Remove a checkpoint that no version of a deployed function uses, or an upload that has not ended."""
    with ApiClient(find_server(url, home)) as server:
        info = find_checkpoint(server, name, unfinished=True)
        if not yes and not info.used_by:
            if not sys.stdin.isatty():
                raise click.UsageError(
                    f"fs weights rm {name} asks for confirmation; give --yes if stdin is not a terminal"
                )
            click.confirm(f"Remove {info.id[:SHORT]}, {output.format_size(info.object_bytes)}?", abort=True)
        info = server.delete(f"/api/v1/checkpoints/{info.id}", CheckpointInfo)
    output.message(f"{info.id[:SHORT]} removed, {output.format_size(info.object_bytes)} freed")
    if as_json:
        output.json_data(info)


@command.command("export")
@click.argument("name", metavar="ID")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option("--max-shard-size", metavar="SIZE", help="Make the files anew, each this large at most, such as 5GB.")
@verb()
@click.pass_obj
def export_(home: Path, *, name: str, folder: Path, max_shard_size: str | None, url: str | None, as_json: bool) -> None:
    """Write a checkpoint back as plain safetensors, with its small files, into an empty folder.

    The files are those that were first pushed with these weights, byte for byte, under the same names. With
    --max-shard-size they are made anew: the same tensors, bit for bit, in the order of layers.
    """
    limit = None if max_shard_size is None else max(1, parse_size(max_shard_size))
    with ApiClient(find_server(url, home)) as server:
        info = find_checkpoint(server, name)
        with ProgressBar(f"export {info.id[:SHORT]}", live=output.is_terminal()) as bar:
            files = export(server, info.id, folder, shard_max_bytes=limit, progress=bar)
    output.message(f"{len(files)} files, {output.format_size(sum(file.stat().st_size for file in files))}")
    if as_json:
        output.json_data({"id": info.id, "files": [str(file) for file in files]})
    else:
        for file in files:
            output.data(str(file))


@command.command
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="NEW-DIR")
@verb(server=False)
def quantize(*, model: Path, folder: Path, as_json: bool) -> None:
    """Write a copy of a language model whose matrices are in int8, into an empty folder.

    Each row of a layer's matrix becomes whole numbers of one byte and one factor; embedding, head and norms stay. The
    matrices are half of what they are in 16 bits, the model starts the sooner for it, and on a CPU the native engine
    gives one request more tokens a second. The format is compressed-tensors' "int-quantized", which vLLM reads, too.
    """
    if importlib.util.find_spec("numpy") is None:
        raise InvalidInput("fs weights quantize computes with numpy, which is not installed", hint="pip install numpy")
    source = read_folder(LocalFolder(model))
    with ProgressBar("quantize", live=output.is_terminal()) as bar:
        written = write_quantized(source, folder, bar)
    before, after = (output.format_size(size) for size in (written.stored_bytes, written.weight_bytes))
    output.message(f"{written.matrices} matrices in int8: {before} of weights are {after} now")
    if as_json:
        output.json_data(
            {
                "files": [str(file) for file in written.files],
                "matrices": written.matrices,
                "stored_bytes": written.stored_bytes,
                "weight_bytes": written.weight_bytes,
            }
        )
    else:
        output.data(str(folder))
