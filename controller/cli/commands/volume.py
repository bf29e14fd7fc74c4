"""`fs volume`: named, versioned folders in the store, which workers see."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import NotFound
from fleetstart.runtime.contract.function.volume import VolumeRef, VolumeVersion, parse_volume

from ...schemas.volumes import Pruned, PruneTerms, VolumeInfo
from .. import output
from ..api_client import ApiClient, find_server
from ..command_group import CommandGroup
from ..progress import ProgressBar
from ..root import verb
from ..volumes.get import get_version
from ..volumes.put import as_json as put_as_json
from ..volumes.put import put_folder, read_manifest, volume_path

FILES_SHOWN = 50


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Volumes: folders in the store with numbered versions. Workers of functions that name them see them read-only
    (`@function(volumes=["index"])`), or add versions. PROJECT.NAME is one of another project. Each command has
    --json."""


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def create(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Create an empty volume, for a function that will fill it. `fs volume put` creates one that does not exist."""
    with ApiClient(find_server(url, home)) as server:
        info = server.put(volume_path(name), {}, VolumeInfo)
    if as_json:
        output.json_data(info)
    else:
        output.data(table([info]))


@command.command
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@verb()
@click.pass_obj
def put(home: Path, *, name: str, folder: Path, url: str | None, as_json: bool) -> None:
    """Make the content of a folder the next version. Files that the newest version has are not sent again.

    \b
    fs volume put index ./index
    fs volume put search.models ~/models
    """
    started_s = time.monotonic()
    with (
        ApiClient(find_server(url, home)) as server,
        ProgressBar(f"volume {name}", live=output.is_terminal()) as bar,
    ):
        done = put_folder(server, name, folder, bar)
    version = done.version
    if as_json:
        output.json_data(put_as_json(done, name))
    elif not done.made:
        output.message(f"{name}@{version.number} has these files already: nothing was sent")
    else:
        output.message(
            f"{name}@{version.number}: {version.files} files, {output.format_size(version.size_bytes)}, "
            f"{output.format_size(version.new_bytes)} new, in {time.monotonic() - started_s:.1f} s"
        )


@command.command
@click.argument("name", metavar="NAME[@VERSION]")
@click.argument("folder", type=click.Path(path_type=Path))
@verb()
@click.pass_obj
def get(home: Path, *, name: str, folder: Path, url: str | None, as_json: bool) -> None:
    """Write the files of a version, the newest by default, into a new folder."""
    with ApiClient(find_server(url, home)) as server:
        ref, version = _version(server, name)
        with ProgressBar(f"volume {ref.name}", live=output.is_terminal()) as bar:
            manifest = get_version(server, version, folder, bar)
    if as_json:
        output.json_data({"name": ref.name, "version": version.number, "files": [file.path for file in manifest.files]})
    else:
        output.message(
            f"{ref.name}@{version.number}: {version.files} files, {output.format_size(version.size_bytes)} in {folder}"
        )


@command.command
@verb()
@click.pass_obj
def ls(home: Path, *, url: str | None, as_json: bool) -> None:
    """List volumes, their newest version, and which functions use them."""
    with ApiClient(find_server(url, home)) as server:
        volumes = server.get("/api/v1/volumes", list[VolumeInfo])
    if as_json:
        output.json_data(volumes)
    elif volumes:
        output.data(table(volumes))
    else:
        output.message("there are no volumes: fs volume put NAME FOLDER")


@command.command
@click.argument("name", metavar="NAME[@VERSION]")
@verb()
@click.pass_obj
def show(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Show the files of a version, the newest by default."""
    with ApiClient(find_server(url, home)) as server:
        ref, version = _version(server, name)
        files = read_manifest(server, version.tree).files
    if as_json:
        listed = [{"path": file.path, "size_bytes": file.size_bytes} for file in files]
        output.json_data({"name": ref.name, "version": version, "files": listed})
        return
    rows = [(file.path, output.format_size(file.size_bytes)) for file in files[:FILES_SHOWN]]
    output.data(output.table(("FILE", "SIZE"), rows, right=frozenset({1})))
    if len(files) > FILES_SHOWN:
        output.message(f"and {len(files) - FILES_SHOWN} more: --json lists all")


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def versions(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """List the versions of a volume, the newest first."""
    with ApiClient(find_server(url, home)) as server:
        info = server.get(volume_path(name), VolumeInfo)
    newest_first = info.versions[::-1]
    if as_json:
        output.json_data(newest_first)
    elif newest_first:
        output.data(versions_table(newest_first))
    else:
        output.message(f"volume {name} has no version yet: fs volume put {name} FOLDER")


@command.command
@click.argument("name")
@click.option("--keep", type=click.IntRange(1), required=True, metavar="N", help="How many of the newest stay.")
@verb()
@click.pass_obj
def prune(home: Path, *, name: str, keep: int, url: str | None, as_json: bool) -> None:
    """Remove old versions. Those that a function names by number stay; files are freed about a day later."""
    with ApiClient(find_server(url, home)) as server:
        done = server.post(f"{volume_path(name)}/prune", PruneTerms(keep=keep), Pruned)
    if as_json:
        output.json_data(done)
        return
    removed = ", ".join(str(version.number) for version in done.removed) or "none"
    output.message(f"removed versions of {name}: {removed}")
    for number, function in done.kept_for.items():
        output.message(f"{name}@{number} stays: function {function} names it")


@command.command
@click.argument("name")
@verb()
@click.pass_obj
def rm(home: Path, *, name: str, url: str | None, as_json: bool) -> None:
    """Remove a volume that no function uses, with all its versions. Running workers keep what they have."""
    with ApiClient(find_server(url, home)) as server:
        info = server.delete(volume_path(name), VolumeInfo)
    if as_json:
        output.json_data(info)
    else:
        output.message(f"volume {info.name} is removed, {len(info.versions)} versions")


def table(volumes: list[VolumeInfo]) -> str:
    rows = []
    for one in volumes:
        newest = one.versions[-1] if one.versions else None
        rows.append(
            (
                one.name,
                str(newest.number) if newest else "-",
                output.format_size(newest.size_bytes) if newest else "-",
                str(newest.files) if newest else "-",
                _age(newest.created_unix_ms if newest else one.created_unix_ms),
                ", ".join(one.used_by) or "-",
            )
        )
    headings = ("VOLUME", "VERSION", "SIZE", "FILES", "AGE", "USED BY")
    return output.table(headings, rows, right=frozenset({1, 2, 3, 4}))


def versions_table(versions: list[VolumeVersion]) -> str:
    rows = [
        (
            str(one.number),
            output.format_size(one.size_bytes),
            str(one.files),
            output.format_size(one.new_bytes),
            _age(one.created_unix_ms),
            one.created_by,
        )
        for one in versions
    ]
    return output.table(("VERSION", "SIZE", "FILES", "NEW", "AGE", "BY"), rows, right=frozenset({0, 1, 2, 3, 4}))


def _age(unix_ms: int) -> str:
    return output.format_age(max(0.0, time.time() - unix_ms / 1000))


def _version(server: ApiClient, text: str) -> tuple[VolumeRef, VolumeVersion]:
    """Errors: InvalidSpec, NotFound."""
    name, _, _ = text.partition("@")
    bare = name.rpartition(".")[2]
    ref = parse_volume(bare + text[len(name) :])._replace(name=name)
    info = server.get(volume_path(name), VolumeInfo)
    for version in reversed(info.versions):
        if ref.version in (None, version.number):
            return ref, version
    what = f"version {ref.version}" if ref.version else "version yet"
    raise NotFound(f"volume {ref.name} has no {what}", hint=f"`fs volume versions {ref.name}` lists them")
