"""Whose line it was: an exception, told with the place in the user's own code.

The traceback that a user needs ends in their file, not in ours or in a library's. The whole of it goes to
the log; the error that a caller sees names the last line inside the bundle.
"""

from __future__ import annotations

import os
import sys
import traceback


def describe(error: BaseException, bundle_dir: str) -> str:
    """For example `ValueError: no such city (handler.py:12, in look_up)`."""
    text = f"{type(error).__name__}: {_message(error)}".rstrip().removesuffix(":")
    place = where(error, bundle_dir)
    return f"{text} ({place})" if place else text


def where(error: BaseException, bundle_dir: str) -> str:
    """`file:line, in function` of the last frame inside the bundle; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(error.filename, bundle_dir) or error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = _relative(frame.filename, bundle_dir)
        if name:
            return f"{name}:{frame.lineno}" + ("" if frame.name == "<module>" else f", in {frame.name}")
    return ""


def log(error: BaseException, headline: str) -> None:
    """The whole traceback to stderr, which is the worker's log."""
    lines = traceback.format_exception(error)
    sys.stderr.write(f"{headline}\n{''.join(lines)}")
    sys.stderr.flush()


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg or ""
    try:
        return str(error)
    except Exception:  # a user's __str__ may raise as well
        return "(its message could not be read)"


def _relative(filename: str, bundle_dir: str) -> str:
    inside = os.path.join(os.path.abspath(bundle_dir), "")
    path = os.path.abspath(filename)
    return path[len(inside) :] if path.startswith(inside) else ""
