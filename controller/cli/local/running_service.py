"""A service of the supervisor with its process: started, reaped, stopped, and its log kept short."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fleetstart.runtime.contract.process.parent_death import kill_with_parent

from .restart_policy import RestartPolicy
from .services import Service

log = logging.getLogger(__name__)

LOG_MAX_BYTES = 8 * 1024 * 1024
"""Largest size of a log; the one before it is kept beside it."""


class RunningService:
    """A service, with its process while it runs."""

    def __init__(self, service: Service, log_path: Path) -> None:
        self.service = service
        self.log_path = log_path
        self.policy = RestartPolicy()
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.started_s = 0.0
        self.start_at_s: float | None = None
        """Time of the next start; None while the service runs, or waits for another one."""
        self.deaths = 0

    def start(self, environ: Mapping[str, str]) -> None:
        self.started_s = time.monotonic()
        with self.log_path.open("ab") as output:
            self.process = subprocess.Popen(
                self.service.argv,
                env={**environ, **self.service.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                pass_fds=self.service.descriptors,
                process_group=0,
                preexec_fn=kill_with_parent(os.getpid()),
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.start_at_s = None
        log.info("started %s, pid %d", self.service.name, self.process.pid)

    def reap(self, now_s: float) -> int:
        assert self.process is not None
        status = self.process.wait()
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1
        self.count_death(now_s)
        return status

    def count_death(self, now_s: float) -> None:
        self.deaths += 1
        self.start_at_s = now_s + self.policy.died(lived_s=now_s - self.started_s)

    def stop(self, grace_s: float) -> None:
        """Stops the process: SIGTERM, then SIGKILL to its whole process group. It has ended when this returns."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("%s did not end within %.0f s", self.service.name, grace_s)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1

    def trim_log(self) -> None:
        """Rotates a log that is too long: copies and empties it, since children hold it open for appending."""
        with suppress(OSError):
            if self.log_path.stat().st_size > LOG_MAX_BYTES:
                shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
                os.truncate(self.log_path, 0)
