"""The Grafana board and the alert rules ask for metrics and labels that `/metrics` has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.controller.cli.root import VERBS
from fleetstart.runtime.contract import errors
from tests.docs.pages import ROOT, rows, sections

FOLDER = ROOT / "docs" / "monitoring"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
FAMILY = re.compile(r'MetricFamily\(\s*"(\w+)", "(\w+)"')
ONE = re.compile(r'_one\("(\w+)"')
OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that Prometheus or its histograms add."""


def exposed() -> set[str]:
    """Names of all samples that the controller can write, seen or not."""
    texts = [path.read_text() for path in (ROOT / "controller").rglob("*.py")]
    families = [found for text in texts for found in FAMILY.findall(text)]
    families += [(name, "gauge") for text in texts for name in ONE.findall(text)]
    return {name + suffix for name, kind in families for suffix in SUFFIXES[kind]}


def labels() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "controller" / "observability").glob("*.py")]
    added = [name for text in texts for call in re.findall(r"\.add\(([^\n]*)\)\n", text)
             for name in re.findall(r"(\w+)=", call)]  # fmt: skip
    of_histograms = [name for text in texts for call in re.findall(r"\.into\(\w+, ([^)]*)\)", text)
                     for name in re.findall(r'"(\w+)"', call)]  # fmt: skip
    return {*added, *of_histograms, *OF_PROMETHEUS}


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def board() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "grafana.json").read_text()))


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in board()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["query"]["query"] for one in board()["templating"]["list"] if one["type"] == "query")


def test_every_metric_that_is_asked_for_is_exposed() -> None:
    asked = {name for text in expressions() for name in re.findall(r"\b(?:fleetstart|process)_\w+", text)}
    assert len(asked) > 20
    assert asked <= exposed()


def test_every_label_that_is_asked_for_is_written() -> None:
    known = labels()
    for text in expressions():
        grouped = [name for names in re.findall(r"by \(([^)]*)\)", text) for name in names.split(", ")]
        matched = re.findall(r"(\w+)(?:=~|!=|=)\"", text)
        assert {*grouped, *matched} <= known, text


def test_error_codes_and_commands_in_rules_exist() -> None:
    codes = {error.code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "code")
             and isinstance(error.code, str)}  # fmt: skip
    for rule in rules():
        for listed in re.findall(r'code=~"([^"]+)"', rule["expr"]):
            assert set(listed.split("|")) <= codes
        for verb in re.findall(r"\bfs (\w+)", rule["annotations"]["action"]):
            assert verb in VERBS
        assert {"summary", "action"} == set(rule["annotations"])


def test_every_alarm_has_its_row_on_the_page_of_operations() -> None:
    page = sections("docs/operations.md")["Alarms"]
    assert [row[0] for row in rows(page)][1:] == [f"`{rule['alert']}`" for rule in rules()]


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(x, y) for panel in panels for at in [panel["gridPos"]]
             for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]  # fmt: skip
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
