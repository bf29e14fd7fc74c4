"""User-facing errors: exceptions of user code, with the place in the user's own files.

The log gets the traceback from the user's first frame on, without the platform's frames above it. The caller's error
names the last line inside the bundle.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import traceback
from types import TracebackType

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of `fleetstart.runtime`."""


def describe(error: BaseException, bundle_dir: str) -> str:
    """One line with type, message and place, for example `ValueError: no such city (handler.py:12, in look_up)`."""
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
    """Writes a headline and the traceback to stderr, the worker's log, from the user's first frame on."""
    lines = traceback.format_exception(type(error), error, _from_theirs(error.__traceback__))
    sys.stderr.write(f"{headline}\n{''.join(lines)}")
    sys.stderr.flush()


def _from_theirs(first: TracebackType | None) -> TracebackType | None:
    link = first
    while link is not None and _is_ours(link.tb_frame.f_code.co_filename):
        link = link.tb_next
    return link or first


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib.")) or filename == importlib.__file__


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


def as_exception(error: BaseException) -> Exception:
    """An exception that may fail a call: SystemExit must not end the worker, StopIteration cannot pass a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"the handler raised {type(error).__name__}: {_message(error)}")
    wrapped.__traceback__ = error.__traceback__
    return wrapped


def of_user(error: BaseException) -> Exception:
    """The error that user code raised, as one that fails its call alone. A CancelledError may be of a task that it has
    awaited, or of its own, which nothing but its time ends from outside. Errors: GeneratorExit itself, which ends a
    coroutine.
    """
    if isinstance(error, GeneratorExit):
        raise error
    if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) is not None:
        while task.cancelling():
            task.uncancel()
    return as_exception(error)
