"""Both forms of log lines carry the sentence, the fields, the request, and the exception."""

from __future__ import annotations

import json
import logging
import sys

from fleetstart.runtime.contract.process.log_format import JsonFormatter, LineFormatter


def record(message: str = "worker %s", *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("fleetstart.node.x", logging.WARNING, "x.py", 1, message, args, None)
    made.__dict__.update(fields)
    return made


def test_a_line_of_json_has_all_there_is() -> None:
    made = record("worker %s", "w-1", bytes_=3, level="mine", path=object)
    line = JsonFormatter("node", lambda: {"request": "inv-1"}).format(made)
    read = json.loads(line)
    assert "\n" not in line
    assert read["message"] == "worker w-1"
    assert (read["level"], read["level_"], read["service"], read["request"]) == ("warning", "mine", "node", "inv-1")
    assert read["bytes_"] == 3
    assert read["time"].endswith("Z")


def test_text_has_the_same_for_people() -> None:
    line = LineFormatter(lambda: {"request": "inv-1"}).format(record("ended", code=3))
    assert line.endswith('warning node.x: ended {"request": "inv-1", "code": 3}')


def test_an_exception_is_in_both() -> None:
    made = record("failed")
    try:
        raise ValueError("no such city")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: no such city" in json.loads(JsonFormatter("node").format(made))["exception"]
    assert "ValueError: no such city" in LineFormatter().format(made)
