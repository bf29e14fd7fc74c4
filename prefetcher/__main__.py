"""`python -m fleetstart.prefetcher`: the node daemon, configured by FS_* variables (see `config`).

Exit codes: 0 after SIGTERM or SIGINT, 1 if it could not run or failed, 2 if a setting is wrong.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys

from fleetstart.runtime.contract.process.descriptors import raise_descriptor_limit
from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.process.log_format import configure
from fleetstart.runtime.contract.process.program import run_program, uncollected_imports
from fleetstart.runtime.contract.process.unused_modules import leave_out_unused_modules

from .config import Config, read_config

END_LIMIT_S = 9.0
"""An orderly shutdown takes far less. After this time the process prints where it hangs and exits, before `fs down`
sends SIGKILL after 10 s; the kernel frees the rest."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parent = os.getppid()
    raise_descriptor_limit()
    os.umask(0o022)  # functions have other users' ids, and read their code and packages; FS_HOME is closed to others
    try:
        config = read_config(os.environ)
    except ConfigError as error:
        print(f"fleetstart node: {error}", file=sys.stderr)
        return 2
    configure(config.log_format, "node")
    if config.parent_death:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            return 1
    leave_out_unused_modules()
    return _run(config)


def _run(config: Config) -> int:
    with uncollected_imports():
        from .control.node_name import NodeNameTaken
        from .network.node_identity import NodeRemoved

    try:
        asyncio.run(_serve(config))
    except (NodeNameTaken, NodeRemoved) as error:
        print(f"fleetstart node: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"fleetstart node: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: Config) -> None:
    with uncollected_imports():
        from .daemon import Daemon
        from .sources.factory import open_source

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        faulthandler.dump_traceback_later(END_LIMIT_S, exit=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await Daemon(config, open_source(config.store, config.http)).run(stop)


if __name__ == "__main__":
    run_program(main)
