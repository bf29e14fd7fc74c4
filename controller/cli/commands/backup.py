"""`fs backup`: what a system cannot compute again, in one file."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import StoreFailed

from .. import output
from ..home import HomeLayout
from ..root import verb


@click.command
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--redis", "redis_url", default="", metavar="URL", envvar="FS_REDIS_URL",
    help="Back up the system of this Redis instead of the one of FS_HOME.",
)  # fmt: skip
@verb(server=False)
@click.pass_obj
def command(home: Path, *, file: Path, redis_url: str, as_json: bool) -> None:
    """Write what a system cannot compute again to FILE, also while it serves calls.

    Functions with all versions, aliases and traffic, keys (hashes), projects with quotas, secrets (encrypted), volumes'
    versions, budgets, prices, schedules, audit log, and the rows of the ledger that are in no segment yet. Not in it:
    the master key of secrets, and the object store, which has code, weights, files of volumes and the ledger's
    segments; keep copies of both.
    """
    from importlib.metadata import version  # late: slow to import

    from ...backup.file import BackupHeader, pack, write
    from ...backup.redis_state import read_state
    from ...backup.tables import masters, unreadable
    from ..local.system_redis import system_redis

    began_s = time.monotonic()
    with system_redis(HomeLayout(home), redis_url, stopped=False) as client:
        created_unix_ms = time.time_ns() // 1_000_000
        state = read_state(client)
    records = sum(map(len, state.values()))
    output.message(f"read {records:,} records at one moment in {time.monotonic() - began_s:.1f} s")
    header = BackupHeader(created_unix_ms=created_unix_ms, release=version("fleetstart"), masters=masters(state))
    data = pack(header, state)
    try:
        write(file, data)
    except OSError as failed:
        raise StoreFailed(
            f"{file} cannot be written: {failed.strerror}", hint="name a file in a folder that exists and has room"
        ) from failed
    odd = unreadable(state)
    for name, error in list(odd.items())[:5]:
        output.message(f"warning: {name} is in the file as it is, but this release cannot read it: {error[:200]}")
    if header.masters:
        output.message(
            f"its secrets are encrypted with master key {', '.join(header.masters)}, which is not in the file: "
            f"keep a copy of {HomeLayout(home).master_key}, or FS_MASTER_KEY, elsewhere"
        )
    if as_json:
        output.json_data(
            {"file": str(file), "size_bytes": len(data), "records": records, "unreadable": len(odd),
             "created_unix_ms": created_unix_ms, "masters": header.masters}
        )  # fmt: skip
    else:
        output.data(f"{file}: {records:,} records, {output.format_size(len(data))}")
