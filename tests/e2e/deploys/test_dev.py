"""`fs dev`: the contract of a server, each save live, and nothing left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.checkpoints import write_safetensors
from tests.e2e.systems import FS, driver_settings, running, with_driver
from tests.servers import plain_environment, spawn, wait_until

HANDLER = """
from fleetstart.runtime import function

@function(memory="64MiB", project="ml", secrets=["DEV_TOKEN"])
def work(word: str = "you"):
    print("worked on", word, __import__("os").environ["DEV_TOKEN"], flush=True)
    return ANSWER
"""


PLAIN = """
from fleetstart.runtime import function

@function(memory="64MiB")
def plain(word: str = "you"):
    print("plain was called")
    return ANSWER
"""
COLD = """
import time
from fleetstart.runtime import function

@function(weights="./w.safetensors", memory="64MiB")
class Weighs:
    def load(self, weights):
        print("loads")
        time.sleep(0.3)
        self.names = list(weights)

    def __call__(self):
        return ANSWER
"""


class Dev:
    def __init__(self, folder: Path, *options: str, source: str = HANDLER) -> None:
        self.source = source
        self.handler = folder / "src" / "handler.py"
        self.handler.parent.mkdir(parents=True, exist_ok=True)
        self.save("1")
        self.tmp = folder / "t"
        self.tmp.mkdir()
        env = plain_environment()
        self.env = {**env, "FS_HOME": str(folder / "home"), "TMPDIR": str(self.tmp), "FS_POOL_MEMORY": "32MiB",
                    "DEV_TOKEN": "a secret"}  # fmt: skip
        self.process = spawn(
            [*FS, *with_driver("dev", str(self.handler), *options)],
            env={**self.env, "FS_PROFILES": "python", **driver_settings({"FS_PROFILES": "python"})},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().strip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return next((line for line in self.lines if line.startswith("http://")), "")

    def save(self, answer: str) -> None:
        self.handler.write_text(self.source.replace("ANSWER", answer))

    def answer(self) -> str:
        return httpx.post(self.url, json={"word": "it"}, trust_env=False, timeout=30).text

    def processes(self) -> list[int]:
        mark = str(self.tmp).encode()
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                command, environ = (Path(f"/proc/{entry}/{name}").read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue
            if int(entry) != os.getpid() and (mark in command or mark in environ):
                found.append(int(entry))
        return found

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.reader.join(10)
        return code


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    with working(Dev(tmp_path)) as dev:
        yield dev


@contextmanager
def working(dev: Dev) -> Iterator[Dev]:
    try:
        wait_until(lambda: dev.url or dev.process.poll() is not None, 60, what="its URL")
        yield dev
    finally:
        if dev.process.poll() is None:
            dev.end(signal.SIGINT)
        for pipe in (dev.process.stdin, dev.process.stdout):
            assert pipe is not None
            pipe.close()


def test_each_save_is_live_a_broken_one_is_told_of_and_nothing_is_left(dev: Dev) -> None:
    assert dev.answer() == "1"
    wait_until(lambda: "worked on it ***" in dev.text, what="what the worker printed")
    dev.save("2")
    wait_until(lambda: dev.answer() == "2", 30, what="the second version")
    dev.save("(")
    wait_until(lambda: "handler.py:9" in dev.text or "was never closed" in dev.text, 30, what="the error")
    assert dev.answer() == "2"
    dev.save("3")
    wait_until(lambda: dev.answer() == "3", 30, what="the third version")
    assert dev.end(signal.SIGINT) == 0
    wait_until(lambda: not dev.processes(), what="the end of its processes")
    assert list(dev.tmp.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_processes_end_with_it_however_it_ends(dev: Dev, number: signal.Signals) -> None:
    assert dev.answer() == "1"
    code = dev.end(number)
    wait_until(lambda: not dev.processes(), 30, what="the end of its processes")
    if number == signal.SIGTERM:
        assert code == 0
        assert list(dev.tmp.iterdir()) == []


def test_each_save_and_each_enter_shows_the_cold_start_beside_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    write_safetensors(tmp_path / "src" / "w.safetensors")
    with working(Dev(tmp_path, "--cold", source=COLD)) as dev:
        wait_until(lambda: "weighs@1, cold start" in dev.text and "billed" in dev.text, 60, what="the first start")
        assert "from the store" in dev.text
        dev.save("2")
        loads = dev.text.count("loads")
        wait_until(lambda: dev.text.count("loads") > loads, 60, what="a start of the second version")
        assert dev.process.stdin is not None
        dev.process.stdin.write(b"\n")  # while the save is deployed and called: it counts
        dev.process.stdin.flush()
        wait_until(lambda: dev.text.count("ms from zero, before") == 2, 60, what="two charts beside the first one")
        assert "weighs@2, cold start" in dev.text
        assert dev.text.count("cold start") == 3
        assert re.search(r"^fetch +now +[█-▏].* ms", dev.text, re.MULTILINE)
        assert dev.end(signal.SIGINT) == 0


def test_elsewhere_it_has_a_name_of_its_own_and_is_removed_in_the_end(tmp_path: Path) -> None:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy(PLAIN.replace("ANSWER", "0"), name="plain")
        with working(Dev(tmp_path, "--url", system.url, source=PLAIN)) as dev:
            assert dev.url == f"{system.url}/fn/plain-dev"
            assert dev.answer() == "1"
            wait_until(lambda: "plain was called" in dev.text, what="what the worker printed")
            dev.save("2")
            wait_until(lambda: dev.answer() == "2", 30, what="the second version")
            assert dev.end(signal.SIGTERM) == 0
        assert system.ok("plain") == 0
        assert system.call("plain-dev").status_code == 404


def test_elsewhere_a_function_that_no_fs_dev_made_is_neither_taken_over_nor_removed(tmp_path: Path) -> None:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy(PLAIN.replace("ANSWER", "0"), name="plain-dev")
        with working(Dev(tmp_path / "before", "--url", system.url, source=PLAIN)) as dev:
            assert dev.process.wait(30) == 1
            dev.reader.join(10)
            assert f"plain-dev at {system.url} was not deployed by `fs dev`" in dev.text
            assert "fs rm plain-dev" in dev.text
        assert system.ok("plain-dev") == 0

        system.fs("rm", "plain-dev", "--yes")
        with working(Dev(tmp_path / "meanwhile", "--url", system.url, source=PLAIN)) as dev:
            assert dev.answer() == "1"
            system.deploy(PLAIN.replace("ANSWER", "0"), name="plain-dev")
            dev.save("2")
            wait_until(lambda: "was not deployed by `fs dev`" in dev.text, 30, what="the refusal")
            assert dev.end(signal.SIGTERM) == 0
        assert system.ok("plain-dev") == 0


def test_elsewhere_what_a_killed_one_left_is_taken_over_and_removed(tmp_path: Path) -> None:
    with running(env={"FS_PROFILES": "python"}) as system:
        with working(Dev(tmp_path / "killed", "--url", system.url, source=PLAIN)) as dev:
            dev.end(signal.SIGKILL)
        assert system.ok("plain-dev") == 1
        with working(Dev(tmp_path / "next", "--url", system.url, source=PLAIN)) as dev:
            dev.save("2")
            wait_until(lambda: dev.answer() == "2", 30, what="its version")
            assert dev.end(signal.SIGTERM) == 0
        assert system.call("plain-dev").status_code == 404
