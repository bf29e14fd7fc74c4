"""Keys from the first `fs up` on, as the owner of a home meets them: what is printed works as it is pasted."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser import browsing
from tests.controller.cli.system import System
from tests.servers import plain_environment, wait_until

HANDLERS = """
from fleetstart.runtime import function

@function(memory="64MiB")
def hello(name: str = "world"):
    return {"message": f"Hello, {name}!"}

@function(memory="64MiB")
def needs(it: str, often: int):
    return [it] * often
"""


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "a home")
    yield system
    system.down()
    system.assert_gone()


def pasted(line: str) -> str:
    """Result of the line in a user's shell, in another folder and without our environment."""
    env = plain_environment()
    quiet = line.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", quiet], env=env, cwd="/", capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def curls(text: str) -> list[str]:
    return re.findall(r"curl .*", text)


def status_of(url: str, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}/api/v1/functions", headers=headers, trust_env=False).status_code


def test_a_fresh_system_has_a_key_and_tells_how_to_call_with_it(system: System, tmp_path: Path) -> None:
    up = system.fs("up", "--port", "0")
    url, file = up.stdout.strip(), system.layout.key
    key = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (status_of(url), status_of(url, key)) == (401, 200)
    assert f"created the first key, for this user only: {file}" in up.stderr
    assert key not in up.stderr
    (line,) = curls(up.stderr)
    assert json.loads(pasted(line))["url"] == url
    (line,) = curls(system.fs("status").stdout)
    assert json.loads(pasted(line))["access"] == "keys"
    assert f"key is in {file}" in system.fs("doctor", "--no-measure", code=None).stdout
    handler = tmp_path / "handler.py"
    handler.write_text(HANDLERS)
    deployed = system.fs("deploy", handler)
    assert deployed.stdout.splitlines() == [f"{url}/fn/hello", f"{url}/fn/needs"]
    hello, needs = curls(deployed.stderr)
    assert json.loads(pasted(hello)) == {"message": "Hello, world!"}
    assert isinstance(json.loads(pasted(needs)), list)
    assert json.loads(system.fs("invoke", "hello", "{}").stdout) == {"message": "Hello, world!"}

    def rejected() -> int:
        return sum(event["status"] == 401 for event in json.loads(system.fs("audit", "--json").stdout))

    wait_until(rejected, what="the rejection above, which is written behind its request")
    assert rejected() == 1, "starting asks nothing without the key"
    system.down()
    again = system.fs("up", "--port", "0", env={"FS_KEY": "of another system"})
    assert "created the first key" not in again.stderr
    assert file.read_text().strip() == key
    assert status_of(again.stdout.strip(), key) == 200
    assert [one["name"] for one in json.loads(system.fs("key", "ls", "--json").stdout)] == ["admin"]


def test_the_link_of_the_dashboard_lets_its_owner_in_and_forgets_the_key(system: System, tmp_path: Path) -> None:
    url = system.up(is_open=False)
    key = system.layout.key.read_text().strip()
    link = system.fs("dashboard").stdout.strip()
    assert link == f"{url}/ui/#key={key}"
    assert key not in urlsplit(link)._replace(fragment="").geturl()
    with browsing(tmp_path / "profile") as page:
        page.command("Page.navigate", url=link)
        wait_until(lambda: page.run("location.href") == f"{url}/ui/#/", what="the page without the key")
        page.shows("live")
        assert "API key" not in page.text
        page.run("location.hash = '#/nodes'")
        page.shows("host memory")
        assert page.run("history.length") <= 3
        assert page.complaints == []
        page.open("about:blank")
        page.open(f"{url}/ui/")
        page.shows("none was sent")
        page.run(f"location.hash = '#key={key}'")  # the link, in a tab that shows the page already
        page.shows("live")
        assert page.run("location.hash") == "#/"
        # `--open` leads through a file, which others cannot read, as they can what a browser is started with.
        opened = system.fs("dashboard", "--open", env={"BROWSER": f"sh -c 'echo %s > {tmp_path / 'shown'}'"})
        assert opened.stdout.strip() == link
        wait_until(lambda: (tmp_path / "shown").exists(), what="the browser")
        shown = (tmp_path / "shown").read_text().strip()
        assert key not in shown
        assert stat.S_IMODE(system.layout.dashboard_page.stat().st_mode) == 0o600
        page.command("Page.navigate", url=shown)
        wait_until(lambda: page.run("location.href") == f"{url}/ui/#/", what="the page behind the file")
        page.shows("live")


def test_open_is_chosen_and_stays_until_a_key_is_made(system: System) -> None:
    up = system.fs("up", "--port", "0", "--open")
    assert status_of(up.stdout.strip()) == 200
    assert not system.layout.key.exists()
    assert "open: programs on this machine need no key" in up.stderr
    assert "access   open: programs on this machine" in system.fs("status").stdout
    assert "open, as chosen" in system.fs("doctor", "--no-measure", code=None).stdout
    assert system.fs("dashboard").stdout.strip().endswith("/ui/")
    assert "there are no keys, so none is lost" in system.fs("key", "recover", code=3).stderr
    system.down()
    url = system.fs("up", "--port", "0").stdout.strip()
    assert status_of(url) == 200, "it had been chosen"
    made = system.fs("key", "create", "me", "--scope", "admin")
    assert system.layout.key.read_text() == made.stdout
    assert (status_of(url), status_of(url, made.stdout.strip())) == (401, 200)
    assert "every request needs a key" in system.fs("status").stdout
    refused = system.fs("up", "--open", code=1).stderr
    assert f"{system.home} has a key, so it cannot be opened" in refused
    system.down()
    url = system.fs("up", "--port", "0").stdout.strip()
    assert (status_of(url), status_of(url, made.stdout.strip())) == (401, 200)
    assert [one["name"] for one in json.loads(system.fs("key", "ls", "--json").stdout)] == ["me"]


def test_who_owns_the_home_gets_in_again_without_the_key(system: System) -> None:
    url = system.up(is_open=False)
    lost = system.layout.key.read_text().strip()
    system.layout.key.unlink()
    refused = system.fs("ls", code=1).stderr
    assert "an API key is needed, and none was sent" in refused
    assert "fs key recover" in refused
    assert "fs key recover" in system.fs("up", code=1).stderr
    recovered = system.fs("key", "recover")
    assert recovered.stdout.strip() == "admin-2"
    key = system.layout.key.read_text().strip()
    assert stat.S_IMODE(system.layout.key.stat().st_mode) == 0o600
    assert key != lost
    assert (status_of(url, key), status_of(url, lost)) == (200, 200)
    system.fs("key", "revoke", "admin")
    assert status_of(url, lost) == 401
    events = json.loads(system.fs("audit", "--json").stdout)
    assert ("local", "key.recover", "key admin-2") in {
        (one["by"], one["verb"], one.get("object", "")) for one in events
    }
    system.down()
    assert "no server runs" in system.fs("key", "recover", code=4).stderr
