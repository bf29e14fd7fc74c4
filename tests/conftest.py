"""Fixtures for all tests: a real Redis. The servers themselves are in tests/servers.py.

`redis_server` can be killed and started again with its data; `redis_url` is its URL, for code that only connects.

Hooks: skips fail in CI, and `--quick` leaves out tests that start a process or run a real model
(tests/runner/outcomes.py); tests with the marker `bed` are skipped where there can be no test bed.
"""

from __future__ import annotations

import gc
import os
import platform
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer

from tests.runner import outcomes, scopes
from tests.servers import RedisServer

END_TO_END = Path(__file__).parent / "e2e"
"""Folder whose tests are all marked `e2e`, by its conftest."""
# No example has a time limit: on a machine whose cores are all taken any may take a second.
hypothesis.settings.register_profile("all tests", deadline=None)
hypothesis.settings.register_profile("quick tests", deadline=None, max_examples=20)
QUICK_PART = 5
"""Divisor with `--quick` of a number of examples that a test has of its own: a fifth is tried, as of the profile's."""
QUICK_LEAST = 5
"""It tries no fewer than these."""
hypothesis.settings.load_profile("all tests")
GUARD = pytest.StashKey[outcomes.QuickGuard]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out tests that start a process or read weights of examples"
    )
    parser.addoption(
        "--isolation",
        choices=("namespaces", "gvisor", "container"),
        default="namespaces",
        help="isolation of the functions that end-to-end tests deploy, unless they name their own",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        hypothesis.settings.load_profile("quick tests")
        platform.platform()  # Python runs `uname` for the first who asks in a process, and keeps the answer
        guard = config.stash[GUARD] = outcomes.QuickGuard()
        guard.install()
        # A test that ends half-way leaves open what it was about to hand to a process.
        config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
        warnings.simplefilter("ignore", ResourceWarning)  # also at the end of the run
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and items stay for good: no collection of garbage looks at them, neither meanwhile nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m 'e2e and ...'` or `-m 'not e2e'` files without such tests are not imported."""
    first, _, rest = str(config.option.markexpr).partition(" and ")
    if rest.startswith("bed") and collection_path.name.startswith("test_"):
        return "mark.bed" not in collection_path.read_text() or None
    if first == "not e2e":
        return collection_path == END_TO_END or None
    if first == "e2e" and collection_path.name.startswith("test_") and END_TO_END not in collection_path.parents:
        return "mark.e2e" not in collection_path.read_text() or None
    return None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> scopes.ByFile | None:
    return scopes.ByFile(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first: else the other workers would wait for it at the end."""
    items.sort(key=lambda item: scopes.place(item.nodeid))
    if config.getoption("--quick"):
        for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
            _try_fewer(test)


def _try_fewer(test: Callable[..., object]) -> None:
    """A fifth of the examples, where their number is not the profile's. Hypothesis keeps it in this attribute alone."""
    own = getattr(test, "_hypothesis_internal_use_settings", hypothesis.settings())
    if own.max_examples != hypothesis.settings().max_examples:
        quick = max(own.max_examples // QUICK_PART, QUICK_LEAST)
        test._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=quick)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    guard = item.config.stash.get(GUARD, None)
    if guard is None:
        return (yield)
    guard.arm()
    try:
        return (yield)
    finally:
        guard.disarm()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("bed") is not None:
        from tests.testbed import why_not

        if reason := why_not():
            pytest.skip(f"no test bed: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    guard = item.config.stash.get(GUARD, None)
    if guard is not None and guard.refused and (report.when == "call" or report.outcome == "failed"):
        outcomes.leave_out(report)
    elif guard is not None and call.excinfo is not None and call.excinfo.errisinstance(outcomes.NotQuick):
        outcomes.leave_out(report)  # by a fixture of several tests, which failed for the first of them
    elif os.environ.get("CI"):
        outcomes.fail_skip(report)
    outcomes.fail_slow(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if item.config.stash.get(GUARD, None) is None:
        return (yield)
    began_s = time.process_time()
    try:
        return (yield)
    finally:
        item.user_properties.append((outcomes.COMPUTED, time.process_time() - began_s))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    for report in sorted(passed, key=outcomes.computed_s, reverse=True):
        if (took_s := outcomes.computed_s(report)) > outcomes.SLOW_S:
            terminalreporter.line(f"{took_s:.1f} s of processor time, and not marked `slow`: {report.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if os.environ.get("CI"):
        outcomes.fail_skip(report)
    return report


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return ("left out", "", "LEFT OUT") if outcomes.is_left_out(report) else None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
