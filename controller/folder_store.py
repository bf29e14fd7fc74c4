"""Objects in a local folder: written beside, synced, renamed, so that a reader sees all of an object or none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from pathlib import Path

from fleetstart.controller.objects import Upload
from fleetstart.runtime.contract.errors import StoreFailed, TooLarge

BLOCK_BYTES = 1 << 20
STALE_S = 3600
"""An upload that was left by a killed controller is swept at the next start, once nobody can still be writing it."""


class FolderStore:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._incoming = root / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > STALE_S:
                    left.unlink()

    async def put(self, key: str, upload: Upload) -> None:
        incoming = self._incoming / secrets.token_hex(16)
        try:
            with incoming.open("xb", buffering=0) as file:
                async for block in upload.blocks(BLOCK_BYTES):
                    await asyncio.to_thread(_write, file.fileno(), block)
                upload.check()
                await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(_publish, incoming, self._root / key)
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be written to {self._root}: {error.strerror}") from error
        finally:
            incoming.unlink(missing_ok=True)

    async def size(self, key: str) -> int | None:
        try:
            return (self._root / key).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be read in {self._root}: {error.strerror}") from error

    async def read(self, key: str, limit_bytes: int) -> bytes | None:
        size_bytes = await self.size(key)
        if size_bytes is None:
            return None
        if size_bytes > limit_bytes:
            raise TooLarge(f"{key} has {size_bytes} bytes, {limit_bytes} at most")
        try:
            return await asyncio.to_thread((self._root / key).read_bytes)
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be read in {self._root}: {error.strerror}") from error


def _write(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _publish(incoming: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming.rename(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
