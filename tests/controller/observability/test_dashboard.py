"""The dashboard's files as a browser gets them: whole, typed, and under a policy that lets nothing else in."""

from __future__ import annotations

import posixpath
import re
from importlib.resources import files
from pathlib import Path

import httpx

from tests.controller.conftest import ControllerProcess

UI = files("fleetstart.controller").joinpath("dashboard")
NAMES = sorted(str(path.relative_to(str(UI))) for path in Path(str(UI)).rglob("*") if path.is_file())
IMPORT = re.compile(r'from "(\.[^"]+)"')
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def policy(answer: httpx.Response) -> dict[str, str]:
    parts = answer.headers["content-security-policy"].split("; ")
    return {name: rest for name, _, rest in (part.partition(" ") for part in parts)}


def test_each_file_is_served_as_what_it_is(controller: ControllerProcess) -> None:
    assert len(NAMES) > 8
    for name in NAMES:
        answer = controller.http.get(f"/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == UI.joinpath(name).read_bytes()
    for at in ("/", "/ui"):
        assert controller.http.get(at).headers["location"] == "/ui/"
    assert controller.http.get("/ui/").content == UI.joinpath("index.html").read_bytes()


def test_the_policy_lets_nothing_in_but_its_own_files(controller: ControllerProcess) -> None:
    found = policy(controller.http.get("/ui/"))
    assert found["default-src"] == "'none'"
    assert found["script-src"] == found["style-src"] == found["connect-src"] == "'self'"
    assert found["frame-ancestors"] == found["base-uri"] == "'none'"
    assert found["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(found)


def test_there_is_no_other_file(controller: ControllerProcess) -> None:
    for path in ("../api.py", "%2e%2e/api.py", "..%2fapi.py", "nothing.js", "a/b/c", "x" * 5000):
        answer = controller.http.get(f"/ui/{path}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] == "not_found"


def test_modules_import_what_is_there_and_nothing_from_elsewhere() -> None:
    for name in NAMES:
        text = UI.joinpath(name).read_text()
        folder = posixpath.dirname(name)
        assert {posixpath.normpath(posixpath.join(folder, one)) for one in IMPORT.findall(text)} <= set(NAMES), name
        outside = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert outside == set(), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text), name
        assert not re.search(r"\bon\w+\s*=\s*[\"']|<style|style=", text), f"{name}: the policy forbids it"


def test_answers_of_the_api_name_their_request(controller: ControllerProcess) -> None:
    given = controller.http.get("/api/v1/functions/none", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "mine-1"
    made = controller.http.get("/api/v1/functions/none", headers={"x-request-id": "no\tgood"})
    assert made.headers["x-request-id"] == made.json()["request_id"]
    assert made.headers["x-request-id"].startswith("req-")


def test_the_api_describes_what_was_added(controller: ControllerProcess) -> None:
    assert "/api/v1/activity" in controller.http.get("/openapi.json").json()["paths"]
    assert controller.http.get("/api/v1/activity").json() == {"window_s": 300, "bucket_s": 10, "functions": []}
