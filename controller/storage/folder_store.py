"""The object store in a local folder. Objects are written aside, synced and linked to their name: a reader sees all or
none, and an object that is there is not replaced, as a rename would, unless it is not what its name's digest says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from fleetstart.runtime.contract.errors import StoreFailed, TooLarge

from .object_store import StoredObject, Upload, is_same, not_found

BLOCK_BYTES = 1 << 20


class FolderStore:
    """`ObjectStore` in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._incoming = root / ".incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)

    async def put(self, key: str, upload: Upload) -> bool:
        incoming = self._incoming / secrets.token_hex(16)
        try:
            with incoming.open("xb", buffering=0) as file:
                async for block in upload.blocks(BLOCK_BYTES):
                    await asyncio.to_thread(_write, file.fileno(), block)
                upload.check()
                await asyncio.to_thread(os.fsync, file.fileno())
            try:
                await asyncio.to_thread(_publish, incoming, self._root / key)
            except FileExistsError:
                if await is_same(self, key, upload):
                    return False
                incoming.replace(self._root / key)  # what was there was damaged
                await asyncio.to_thread(_sync_folder, (self._root / key).parent)
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be written to {self._root}: {error.strerror}") from error
        finally:
            incoming.unlink(missing_ok=True)
        return True

    async def create(self, key: str, data: bytes) -> bool:
        try:
            return await asyncio.to_thread(self._create, self._incoming / secrets.token_hex(16), self._root / key, data)
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be written to {self._root}: {error.strerror}") from error

    def _create(self, incoming: Path, target: Path, data: bytes) -> bool:
        try:
            with incoming.open("xb", buffering=0) as file:
                _write(file.fileno(), data)
                os.fsync(file.fileno())
            _publish(incoming, target)
        except FileExistsError:
            return False
        finally:
            incoming.unlink(missing_ok=True)
        return True

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

    async def read_range(self, key: str, offset: int, size_bytes: int) -> AsyncGenerator[bytes, None]:
        end = offset + size_bytes
        try:
            with (self._root / key).open("rb", buffering=0) as file:
                while offset < end:
                    block = await asyncio.to_thread(os.pread, file.fileno(), min(BLOCK_BYTES, end - offset), offset)
                    if not block:
                        raise StoreFailed(f"{key} ends at {offset:,} bytes, {end:,} were asked for")
                    offset += len(block)
                    yield block
        except FileNotFoundError as error:
            raise not_found(key) from error
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be read in {self._root}: {error.strerror}") from error

    async def list(self, prefix: str) -> list[StoredObject]:
        try:
            return await asyncio.to_thread(_listed, self._root, self._root / prefix)
        except OSError as error:
            raise StoreFailed(f"{prefix}: cannot be listed in {self._root}: {error.strerror}") from error

    async def delete(self, key: str) -> None:
        path = self._root / key
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError as error:
            raise StoreFailed(f"{key}: cannot be deleted in {self._root}: {error.strerror}") from error
        with contextlib.suppress(OSError):  # others are in it still
            path.parent.rmdir()

    async def sweep(self, older_than_s: float) -> int:
        """Removes old incomplete uploads. One in progress is written all the time; one of a killed controller grows
        old."""
        swept = 0
        for left in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > older_than_s:
                    left.unlink()
                    swept += 1
        return swept


def _listed(root: Path, folder: Path) -> list[StoredObject]:
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            stat = path.stat()
            if path.is_file():
                key = path.relative_to(root).as_posix()
                modified_unix_ms = stat.st_mtime_ns // 1_000_000
                found.append(StoredObject(key=key, size_bytes=stat.st_size, modified_unix_ms=modified_unix_ms))
    return sorted(found, key=lambda stored: stored.key)


def _write(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _publish(incoming: Path, target: Path) -> None:
    """Errors: FileExistsError."""
    while True:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(incoming, target)
            break
        except FileNotFoundError:  # a removal of the last object took the folder with it
            if not incoming.exists():
                raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
