"""Outcomes of tests that pytest does not have: a skip that fails in CI, a test left out of the quick ones, a slow one.

- In CI (`CI` is set) a skipped test fails, unless its reason is in `ALLOWED_IN_CI`.
- With `--quick` a test that is about to start a process, or to read the weights of an example, ends there and is
  counted as left out. So the quick tests are selected by what tests do, and no list of them can grow old. Those that
  compute for long have the mark `slow`; one that lacks it is named at the end, and fails far above the limit.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from _pytest.outcomes import Skipped

ALLOWED_IN_CI = (r"needs a CUDA device", r"lets us write no cgroup v1", r"needs vLLM: make vllm-test", r"needs AMX")
"""Reasons, as patterns: hardware that CI does not have, the version of cgroups that a machine does not use, and a
package that has an environment of its own, of gigabytes."""

PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}
)
"""Audit events with which Python starts a process."""
COMPUTED = "computed_s"
"""Name of the property of a report that says how much processor time the test took, in all threads of its process."""
SLOW_S = 0.6
"""A quick test is named from here on: the mark's 0.3 s, as a machine with other work measures them."""
TOO_SLOW_S = 6.0
"""A quick test fails from here on. Imports of large libraries, which the first test that needs one pays, are below."""
LEFT_OUT = "left out: not quick"
EXAMPLE_WEIGHTS = re.compile(r"examples/\w+/weights/")
"""Real models: `make models` fetches them, and a test that runs one takes many seconds."""


class NotQuick(Skipped):
    """A test was about to do what `--quick` rules out. No `except Exception` catches it."""


class QuickGuard:
    """Audit hook that refuses processes and example weights. Python keeps hooks for good: it is armed and disarmed."""

    def __init__(self) -> None:
        self.armed = False
        self.refused = False
        """Something was refused since the guard was armed: also where the exception was caught or ended a thread."""

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def arm(self) -> None:
        self.armed, self.refused = True, False

    def disarm(self) -> None:
        self.armed = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and (event in PROCESS_EVENTS or (event == "open" and _is_example_weights(arguments[0]))):
            self.refused = True
            raise NotQuick(event)


def _is_example_weights(path: object) -> bool:
    return isinstance(path, str) and EXAMPLE_WEIGHTS.search(path) is not None


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The words of a skip, without pytest's prefix."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def fail_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure, unless its reason is allowed. An expected failure (xfail) is no skip."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = reason_of(report)
    if not any(re.search(pattern, reason) for pattern in ALLOWED_IN_CI):
        report.outcome = "failed"
        report.longrepr = f"skipped, and in CI nothing may be ({reason}): install what it waits for"


def leave_out(report: pytest.TestReport) -> None:
    """Marks the report as that of a test which is not quick."""
    report.outcome = "skipped"
    report.longrepr = ("", 0, LEFT_OUT)


def computed_s(report: pytest.TestReport) -> float:
    """Processor time of the test, measured with `--quick`."""
    return next((float(str(value)) for name, value in report.user_properties if name == COMPUTED), 0.0)


def fail_slow(report: pytest.TestReport) -> None:
    """Turns a pass into a failure if the test took so much processor time that it cannot be a quick one."""
    if report.when == "call" and report.outcome == "passed" and (took_s := computed_s(report)) > TOO_SLOW_S:
        report.outcome = "failed"
        report.longrepr = f"took {took_s:.1f} s of processor time without the mark `slow`: make it cheaper, or mark it"


def is_left_out(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return isinstance(report.longrepr, tuple) and report.longrepr[2] == LEFT_OUT
