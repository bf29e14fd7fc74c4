"""`fs restore`: joins a backup with what the system's Redis holds, all or nothing."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetstart.runtime.contract.errors import NotFound

from .. import output
from ..home import HomeLayout
from ..root import verb


@click.command
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--redis", "redis_url", default="", metavar="URL", envvar="FS_REDIS_URL",
    help="Restore into this Redis instead of the one of FS_HOME.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Only check the file; nothing is changed, and the system may run.")
@click.option("--leave-unreadable", is_flag=True, help="Leave out records that this release cannot read.")
@verb(server=False)
@click.pass_obj
def command(home: Path, *, file: Path, redis_url: str, check: bool, leave_unreadable: bool, as_json: bool) -> None:
    """Restore a backup into the Redis of a system that is stopped: an empty one, an older or a newer one.

    Functions, projects, secrets, volumes and budgets become those of the backup. Keys that were revoked in either stay
    revoked, numbers of versions that were given stay taken, and no row of the ledger is lost. A file that is damaged,
    or that a later release has written, changes nothing.
    """
    from ...backup.file import read
    from ...backup.redis_state import write_state
    from ...backup.tables import require_whole, unreadable, without
    from ..local.system_redis import system_redis
    from ..units import format_utc

    began_s = time.monotonic()
    try:
        header, state = read(file)
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from error
    left_out = unreadable(state) if leave_unreadable else {}
    state = without(state, left_out)
    require_whole(state)
    records = sum(map(len, state.values()))
    output.message(f"{file} is whole: {records:,} records of {format_utc(header.created_unix_ms)}")
    for name, error_text in left_out.items():
        output.message(f"left out: {name}: {error_text[:200]}")
    layout = HomeLayout(home)
    if not check:
        with system_redis(layout, redis_url, stopped=True) as client:
            write_state(client, state)
        output.message(f"restored in {time.monotonic() - began_s:.1f} s; now: fs up")
    if header.masters:
        output.message(
            f"its secrets need master key {', '.join(header.masters)}, in {layout.master_key} or FS_MASTER_KEY"
        )
    if as_json:
        output.json_data(
            {"file": str(file), "records": records, "left_out": sorted(left_out), "restored": not check,
             "created_unix_ms": header.created_unix_ms, "masters": header.masters}
        )  # fmt: skip
    else:
        output.data(f"{records:,} records {'checked' if check else 'restored'}")
