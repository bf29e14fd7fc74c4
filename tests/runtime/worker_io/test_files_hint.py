"""Hints about what a worker may write, from the errors of its files."""

from __future__ import annotations

import errno
import os

import pytest

from fleetstart.runtime.worker_io.files_hint import files_hint


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "half of the function's `memory`"), (errno.EROFS, "in /tmp alone")]
)
def test_what_cannot_be_written_leads_to_where_it_can(code: int, said: str) -> None:
    try:
        raise OSError(code, os.strerror(code))
    except OSError as cause:
        error = RuntimeError("a library's own")
        error.__cause__ = cause
    assert said in files_hint(error)


def test_other_errors_have_other_causes() -> None:
    assert files_hint(FileNotFoundError(errno.ENOENT, "no such file")) == ""
    assert files_hint(OSError("without a number")) == ""
    assert files_hint(KeyError("/tmp")) == ""
