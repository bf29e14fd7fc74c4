"""Links in the documentation lead to files, headings and tests that exist; features name the tests that show them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import NAMES, ROOT

_LINK = re.compile(r"\]\((?!\w+:)([^)\s]*)\)")
README_LINES_MAX = 250
WORDS_MIN = 60
FEATURES = [line for line in (ROOT / "docs" / "features.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_what_exists(name: str) -> None:
    page = ROOT / name
    for link in _LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


@pytest.mark.slow
@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.split("|")[2].strip())
def test_a_feature_has_the_tests_that_it_names(row: str) -> None:
    _, _, _, here, shown, _ = row.replace("\\|", "/").split("|")
    named = re.findall(r"\]\(\.\./([^)#]+)#(\w+)\)", shown)
    assert named or "not there" in here
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }


def test_features_are_numbered_in_order() -> None:
    assert [int(row.split("|")[1]) for row in FEATURES] == list(range(1, len(FEATURES) + 1))


def test_what_features_lack_is_summed_up() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    (lacking,) = re.findall(r"^Not there: rows? ([\d, ]+)\.", text, re.MULTILINE)
    assert lacking.split(", ") == [row.split("|")[1].strip() for row in FEATURES if "**not there**" in row]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_every_page_is_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    elsewhere = {"docs/api.md", "docs/design-life-of-a-call.md"}  # the pages on handlers and on design have these
    pages = {name for name in NAMES if name.startswith("docs/")} - elsewhere
    assert {name for name in pages if f"({name})" not in text} == set()


def test_words_of_the_glossary_are_sorted_and_said_once() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    assert len(set(words)) == len(words) >= WORDS_MIN


def _anchors(page: Path) -> set[str]:
    """As code hosts and the site's generator make them, which are alike for headings of plain words."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
