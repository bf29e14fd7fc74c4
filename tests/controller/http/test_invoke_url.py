"""The parts of an invoke URL, from its path as it was decoded and as it was written."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from fleetstart.controller.http.invoke_url import parse_target, with_full_name


@pytest.mark.parametrize("written", ["/fn/web/a%2Fb", "/fn/w%65b/a%2Fb", "/fn/web%402/a%2Fb", "/fn/web@2/a%2Fb"])
def test_a_name_may_be_written_with_escapes(written: str) -> None:
    target = parse_target(unquote(written), written.encode(), b"x=%20")
    assert (target.name, target.version) == ("web", 2 if "2/" in written else None)
    assert target.rest == "/a%2Fb?x=%20"
    assert target.root == written.removesuffix("/a%2Fb")


@pytest.mark.parametrize("written", ["/fn/w%2565b/a", "/fn/web%2Fa", "/fn/web%25402/a", "/f%6e/web/a"])
def test_a_name_is_decoded_once_and_ends_where_its_segment_does(written: str) -> None:
    """A rule of a reverse proxy for `/fn/web` sees the same name."""
    path, raw_path = with_full_name(unquote(written), written.encode(), "team")
    assert "web" not in parse_target(path, raw_path, b"").name.split(".")


def test_a_name_without_a_project_is_in_the_callers() -> None:
    assert with_full_name("/fn/web/a/b", b"/fn/w%65b/a%2Fb", "team") == ("/fn/team.web/a/b", b"/fn/team.web/a%2Fb")
    assert with_full_name("/fn/our.web@2", b"/fn/our.web@2", "team") == ("/fn/our.web@2", b"/fn/our.web@2")
