"""Scopes of end-to-end tests: which of them share a worker of pytest-xdist, and which scopes begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

BENCHMARKS = "tests/bench/test_scripts.py"
COMMANDS = "tests/docs/test_commands.py"
PIPELINES = "tests/e2e/pipelines/"
IMAGES = "tests/e2e/images/"
SHARED_SYSTEM = "the system of all tests"
ON_SHARED_SYSTEM = frozenset(
    f"tests/e2e/{name}.py"
    for name in (
        "calls/test_chat",
        "calls/test_devices",
        "calls/test_engines",
        "calls/test_explain",
        "calls/test_hostile_http",
        "calls/test_scale",
        "calls/test_tensor_parallel",
        "deploys/test_bad_input",
        "isolation/test_isolation",
        "isolation/test_misbehaving",
    )
)
"""Files whose tests use the fixture `system` of tests/e2e/conftest.py, which holds that none is missing here."""
LONGEST_FIRST = (PIPELINES, SHARED_SYSTEM, BENCHMARKS, COMMANDS, IMAGES, "")
"""Groups of tests, and last those of none. What takes longest comes first: else the other workers would wait for it."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """For `--dist loadscope`: a file's tests share a worker and what is set up in it; each benchmark goes where it can.

    Together the benchmarks would be the longest file by far, and the other workers would wait for theirs. The pipelines
    share a test bed, which waits more than it computes: one worker has it from the beginning, beside all others. So has
    another one the system that files share: each worker would start one, and keep it to the end. Images are built once.
    """

    def _split_scope(self, nodeid: str) -> str:
        group = _group(nodeid)
        if group in (PIPELINES, IMAGES, SHARED_SYSTEM):
            return group
        return nodeid if group == BENCHMARKS else _file(nodeid)


def place(nodeid: str) -> int:
    """Place of the test's group in the order in which groups begin."""
    return LONGEST_FIRST.index(_group(nodeid))


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _group(nodeid: str) -> str:
    if _file(nodeid) in ON_SHARED_SYSTEM:
        return SHARED_SYSTEM
    return next((start for start in (PIPELINES, IMAGES, BENCHMARKS, COMMANDS) if nodeid.startswith(start)), "")
