"""Log formats of all processes: text for people, or one JSON object a line for machines (FS_LOG_FORMAT).

A record is a fixed sentence with fields (`extra`); both formats have all of them, and the fields of the request that
the process acts for.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OWN = frozenset({"time", "level", "service", "logger", "message", "exception"})


def no_fields() -> Mapping[str, str]:
    return {}


def configure(form: LogFormat, service: str, context: Callable[[], Mapping[str, str]] = no_fields) -> None:
    """Configures the process's log, on stderr. `context` gives fields that each record has besides its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(service, context) if form == "json" else LineFormatter(context))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _fields(record: logging.LogRecord, context: Mapping[str, str]) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**context, **own}


class LineFormatter(logging.Formatter):
    """The text format: time, level, module, sentence, fields as JSON; a traceback follows on its own lines."""

    def __init__(self, context: Callable[[], Mapping[str, str]] = no_fields) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record, self._context())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = record.name.removeprefix("fleetstart.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {where}: {record.getMessage()}"
        if fields:
            line = f"{line} {json.dumps(fields, default=str)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """The JSON format: one object a line. A field whose name is taken gets an underscore."""

    def __init__(self, service: str, context: Callable[[], Mapping[str, str]] = no_fields) -> None:
        super().__init__()
        self._service = service
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record, self._context()).items():
            line[f"{name}_" if name in _OWN else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
