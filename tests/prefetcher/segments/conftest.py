"""File systems of a test's own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A mounted file system; needs the right to mount."""
    kind, options = request.param
    folder = tmp_path / kind
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind.encode(), str(folder).encode(), kind.encode(), 0, options.encode()) != 0:
        pytest.skip(f"no right to mount: {os.strerror(ctypes.get_errno())}")
    yield folder
    assert libc.umount2(str(folder).encode(), 2) == 0
