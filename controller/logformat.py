"""How the controller's log looks: time, level, module, a fixed sentence, then its fields."""

from __future__ import annotations

import json
import logging
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = record.name.removeprefix("fleetstart.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {where}: {record.getMessage()}"
        if fields:
            line = f"{line} {json.dumps(fields, default=str)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
