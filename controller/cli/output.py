"""Output and exit codes of the command line.

Only data goes to stdout, so that `url=$(fs deploy handler.py)` works; messages for people go to stderr. Scripts may
rely on the exit codes (EXIT_CODES).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any

import click
import msgspec

from fleetstart.runtime.contract.errors import ErrorBody, FleetError, NotFound

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
UNREACHABLE = 4
INTERRUPTED = 130
NAMED_MAX = 20
"""Names in a line: all functions of some thousand would hide what stands above or beside them."""

EXIT_CODES = {
    OK: "success",
    FAILED: "the call, the function or the operation failed",
    USAGE: "invalid command line",
    NOT_FOUND: "no such function, invocation or file",
    UNREACHABLE: "no server answers",
    INTERRUPTED: "interrupted",
}


class Unreachable(FleetError):
    """No server answered at the URL."""

    code = "unreachable"
    status = 503
    retryable = True


class ConnectionCut(Unreachable):
    """The connection to the server broke during a call; the server may be back in a moment."""


def exit_code(error: FleetError) -> int:
    if isinstance(error, Unreachable):
        return UNREACHABLE
    return NOT_FOUND if isinstance(error, NotFound) else FAILED


_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_RESET = "\x1b[0m"


def printable(text: str) -> str:
    """Text of others, such as a function's log lines, as it may be shown in a terminal: colours stay; other control
    characters, which could rewrite the screen or answer for the user, are shown as escapes."""
    found = _CONTROL.search(text)
    if found is None:
        return text
    shown = _CONTROL.sub(_escaped, text)
    return shown + _RESET if "\x1b[" in shown and not shown.endswith(_RESET) else shown


def _escaped(match: re.Match[str]) -> str:
    text = match[0]
    return text if len(text) > 1 else text.encode("unicode_escape").decode("ascii")


def on_one_line(text: str) -> str:
    """Text of others within a line of ours, where a line break could begin a line that looks like another of ours."""
    return printable(text).replace("\n", "\\n")


def show_what_the_terminal_cannot() -> None:
    """Has characters that stdout's encoding lacks written as escapes, as stderr does: a locale without UTF-8 has no
    arrow, and a name of a file may be no text at all."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def message(text: str = "") -> None:
    """Writes a line for people to stderr."""
    click.echo(printable(text), err=True)


def data(text: str) -> None:
    """Writes lines of data to stdout. They have text of others, too: a path that was rejected, an error of a start."""
    click.echo(printable(text))


def json_data(value: Any) -> None:
    click.echo(msgspec.json.format(_json(value), indent=2).decode())


def json_line(value: Any) -> None:
    click.echo(_json(value).decode())


def _json(value: Any) -> bytes:
    """The value as JSON. A name of a file that is no text has its bytes as escapes, as in messages."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(value)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list) else value


def show_error(error: FleetError, *, as_json: bool) -> None:
    if as_json:
        click.echo(_json(ErrorBody(error=error.info())).decode(), err=True)
        return
    message(click.style("error: ", fg="red", bold=True) + error.message)
    if error.hint:
        message(click.style("hint:  ", fg="yellow") + error.hint)


def is_terminal() -> bool:
    """Checks whether stderr is a terminal, which gets progress bars and colours in place of plain lines."""
    return sys.stderr.isatty()


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Columns of text, as wide as their widest cell; `right` names the columns of numbers.

    A cell stays in its row: what others wrote there must not look like rows of its own.
    """
    lines = [list(headings), *([on_one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    out = []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def csv(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Comma-separated values as RFC 4180 quotes them, without the last line's end."""
    from csv import writer
    from io import StringIO

    out = StringIO()
    writer(out, lineterminator="\n").writerows([headings, *rows])
    return out.getvalue().rstrip("\n")


def first_of(names: Sequence[str]) -> str:
    """The names, or the first of many: "a, b and 2,998 more"."""
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")


def format_size(count: int) -> str:
    """Formats a size: 1536 → "1.5 KiB"."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_age(seconds: float) -> str:
    """Formats an age: "45s", "12m", "3h" or "2d"."""
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds // 86_400)}d"
