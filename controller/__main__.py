"""The controller process, `python -m fleetstart.controller`: configured by FS_* variables, runs until SIGTERM."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

import uvloop

from fleetstart.runtime.contract.process.descriptors import raise_descriptor_limit
from fleetstart.runtime.contract.process.environment import ConfigError
from fleetstart.runtime.contract.process.log_format import configure
from fleetstart.runtime.contract.process.program import run_program, uncollected_imports
from fleetstart.runtime.contract.process.unused_modules import leave_out_unused_modules

from .config import Config, read_config
from .http.request_context import log_fields

PR_SET_PDEATHSIG = 1


async def _run(config: Config) -> None:
    leave_out_unused_modules()
    with uncollected_imports():
        from .app import Controller

        controller = Controller(config)
    await controller.run()


def main() -> int:
    parent = os.getppid()
    try:
        config = read_config(os.environ)
    except ConfigError as error:
        print(f"fleetstart.controller: {error}", file=sys.stderr)
        return 2
    if config.parent_death:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1  # the parent died before prctl
    configure(config.log_format, "controller", log_fields)
    raise_descriptor_limit()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs streams that are cut on purpose
    try:
        uvloop.run(_run(config))
    except ConfigError as error:
        print(f"fleetstart.controller: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fleetstart.controller: cannot serve on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_program(main)
