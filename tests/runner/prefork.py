"""Pre-forked workers of pytest: one process collects all tests, its forks run them.

It is loaded and asked for by `-p tests.runner.prefork --prefork 4`.

Each worker of pytest-xdist imports and collects every file of tests, and imports torch, by itself: a third of the
processor time of the quick tests in a fresh clone. A fork has all of it. The parent hands out one file at a time; a
worker asks for the next before the last test of the one it has, so that pytest knows which fixtures are used again.
Reports come back as xdist's do. A worker that dies fails the test that it ran, and another does the rest of its file.

It is for tests that start no process (`--quick`): others may find in a fork what they expect of a process of its own.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing.connection
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import execnet
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prefork", type=int, default=0, metavar="N", help="run tests in N forks")
    parser.addoption("--preload", action="append", default=[], metavar="MODULE", help="import it before the forks")


def pytest_configure(config: pytest.Config) -> None:
    if count := config.getoption("--prefork"):
        config.pluginmanager.register(Parent(count, preloaded=config.getoption("--preload")))


@dataclass(slots=True)
class Worker:
    """A fork, as the parent sees it."""

    pid: int
    left: deque[int] = field(default_factory=deque)
    """Tests that it was given and has not finished, of which it runs the first."""


class Parent:
    """Hands out files of tests to the workers, and reports for them."""

    def __init__(self, count: int, preloaded: Sequence[str]) -> None:
        self._count, self._preloaded = count, preloaded
        self._files: deque[Sequence[int]] = deque()
        self._workers: dict[Connection, Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        paths = [item.nodeid.partition("::")[0] for item in session.items]
        self._files.extend(list(file) for _, file in itertools.groupby(range(len(paths)), key=paths.__getitem__))
        _preload(self._preloaded)
        try:
            for _ in range(min(self._count, len(self._files))):
                self._fork(session)
            while self._workers:
                for connection in multiprocessing.connection.wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._receive(session, connection)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _fork(self, session: pytest.Session) -> None:
        ours, theirs = multiprocessing.connection.Pipe()
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all workers
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._workers):
                connection.close()
            _work(session, theirs)
        theirs.close()
        self._workers[ours] = Worker(pid)

    def _receive(self, session: pytest.Session, connection: Connection) -> None:
        worker = self._workers[connection]
        try:
            kind, value = execnet.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._ended(session, connection)
            return
        if kind == "next":
            file = self._files.popleft() if self._files else ()
            worker.left.extend(file)
            connection.send_bytes(execnet.dumps(tuple(file)))
            return
        item = session.items[worker.left[0]]
        if kind == "report":
            report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
            item.ihook.pytest_runtest_logreport(report=report)
        elif kind == "start":
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        else:
            worker.left.popleft()
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, session: pytest.Session, connection: Connection) -> None:
        worker = self._workers.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if not worker.left:
            return
        item = session.items[worker.left.popleft()]
        said = f"the process of this test ended in the midst of it (exit code {code})"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        if worker.left:
            self._files.appendleft(tuple(worker.left))
        if self._files:
            self._fork(session)


class Reports:
    """Plugin of a worker: sends the parent what its terminal is to show."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def send(self, kind: str, value: Any = None) -> None:
        self._connection.send_bytes(execnet.dumps((kind, value)))

    def pytest_runtest_logstart(self) -> None:
        self.send("start")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.send("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self.send("finish")


def _preload(modules: Sequence[str]) -> None:
    """Imports what most workers would import late, and keeps the collector of garbage away from it, as from tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    gc.freeze()


def _work(session: pytest.Session, connection: Connection) -> None:
    """The life of a worker. Does not return."""
    try:
        _be_silent(session.config)
        _run(session, connection)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _be_silent(config: pytest.Config) -> None:
    """The terminal is the parent's; and what tests print goes to files that no other worker writes to."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _run(session: pytest.Session, connection: Connection) -> None:
    reports = Reports(session.config, connection)
    session.config.pluginmanager.register(reports)

    def next_file() -> Sequence[int]:
        reports.send("next")
        indices: Sequence[int] = execnet.loads(connection.recv_bytes())
        return indices

    waiting = deque(next_file())
    while waiting:
        item = session.items[waiting.popleft()]
        if not waiting:
            waiting.extend(next_file())
        following = session.items[waiting[0]] if waiting else None
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
