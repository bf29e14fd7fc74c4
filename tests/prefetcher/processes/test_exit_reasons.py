"""Errors of ended workers, in words that users can act on."""

from __future__ import annotations

import pytest

from fleetstart.prefetcher.processes.exit_reasons import exit_error
from fleetstart.runtime.contract.sizes import MIB


@pytest.mark.parametrize(
    ("status", "oom", "was_ready", "code", "words"),
    [
        (-9, True, True, "out_of_memory", "out of memory: limit 256 MiB"),
        (-9, True, False, "out_of_memory", "out of memory: limit 256 MiB"),
        (-9, False, True, "worker_lost", "killed by SIGKILL"),
        (-11, False, False, "start_failed", "before it was ready: killed by SIGSEGV"),
        (3, False, True, "worker_lost", "exit code 3"),
        (88, False, True, "worker_lost", "one of the processes that its model is split over was lost (exit code 88)"),
        (0, False, True, "worker_lost", "exit code 0"),
        (86, False, True, "worker_lost", "a call did not end at its deadline"),
        (None, False, True, "worker_lost", "its fork server died"),
        (-200, False, True, "worker_lost", "signal 200"),
    ],
)
def test_each_ending_has_its_code_and_words(
    status: int | None, oom: bool, was_ready: bool, code: str, words: str
) -> None:
    error = exit_error(status, oom=oom, limit_bytes=256 * MIB, was_ready=was_ready, stuck_status=86)

    assert error.code == code
    assert words in error.message
