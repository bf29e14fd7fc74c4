"""Volumes in a handler: `volume("index").path`, and new versions with `writable()` and `commit()`.

A worker keeps the version that it started with. `writable()` is a private copy in the worker's own scratch space; a
commit sends it to the node, which checks it, stores it and makes it the next version, or refuses it and changes
nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket

from ..contract.errors import Conflict, ErrorInfo, FleetError
from ..contract.function.tree import list_files
from ..contract.function.volume import WRITE, MountedVolume
from ..contract.node.volume_stream import (
    FILE_MESSAGE_BYTES,
    Commit,
    Done,
    Incoming,
    Message,
    Reload,
    StreamClosed,
    TransferAborted,
    VolumeStream,
    check_announced,
    discard_files,
    receive_files,
    send_files,
)
from .committed_files import Committed, is_still, open_unseen, watch


class VolumeError(RuntimeError):
    """A volume could not be read or written; nothing was changed."""


class VolumeConflict(VolumeError):
    """Another version came after the one that the commit is based on; nothing was changed.

    `reload()` gets the newest version, on which the change can be made again.
    """


class Volume:
    """A volume as this worker sees it."""

    def __init__(self, mounted: MountedVolume, folder: str, ask: Callable[[], _Node]) -> None:
        self.name = mounted.name
        self._version = mounted.number
        self._write = mounted.write
        self._ask = ask
        self._writing = threading.Lock()
        self._copy: Path | None = None
        """The private copy that is being written."""
        self._committed: Committed | None = None
        """Files of the copy as they were last committed; None: nothing was committed."""
        self._stale = False
        """The node takes another version for this worker's, which it could not write down."""
        self._own: Path | None = None
        """Folder in the scratch space with the present version; None: as it was mounted."""
        self._mounted = Path(folder) if folder else None

    def __repr__(self) -> str:
        return f"Volume({self.name!r}, version={self.version})"

    @property
    def version(self) -> int:
        """Number of the version at `path`; 0: the volume has none yet, and the folder is empty."""
        return self._version

    @property
    def path(self) -> Path:
        """Folder of the files. Read-only; after a `commit()` or a `reload()`, another one."""
        if self._own is None:
            if self._mounted is not None:
                return self._mounted
            self._own = self._scratch()
        return self._own

    @contextmanager
    def writable(self) -> Iterator[Path]:
        """A private copy of the files, for one call of this worker at a time. What `commit()` did not store is dropped.

        Raises:
            VolumeError: The volume is not declared as writable, another call writes it, or the scratch space is full.
                At the end of the block: more was written after a `commit()`, and what was committed could not be had
                from the node. If the block itself raised, its own exception is raised, and this one is printed.
        """
        self._begin("written")
        try:
            self._copy, self._committed, former = self._copied(), None, self._version
            try:
                yield self._copy
            except BaseException:
                try:
                    self._leave(former)
                except VolumeError as error:  # the handler's own exception tells it more
                    print(f"what was committed to volume {self.name} is not here: {error}", file=sys.stderr, flush=True)
                raise
            self._leave(former)
        finally:
            self._writing.release()

    def _leave(self, former: int) -> None:
        """Drops the copy, or makes it the folder of the version that was committed. If more was written since, the node
        sends that version. `former`: number of the version at `path`. Errors: VolumeError."""
        copy, self._copy = self._copy, None
        assert copy is not None, "the block has a copy up to its end"
        if self._committed is not None and is_still(copy, self._committed):
            self._replace(copy)
            return
        shutil.rmtree(copy, ignore_errors=True)
        if self._committed is not None:
            self._version, self._stale = former, True
            self._fetch(again=True)

    def commit(self) -> int:
        """Makes the files of the writable copy the next version, all or nothing; returns its number.

        Workers that start from now on have it, and this one. Files that have not changed are not sent again, and if
        none has, no version is made.

        Raises:
            VolumeConflict: Another version came after the one that the copy is based on.
            VolumeError: What is in the folder cannot be stored, or the store cannot be reached.
        """
        if self._copy is None:
            raise VolumeError(f"commit() of volume {self.name} belongs inside `with v.writable() as folder:`")
        node, copy = self._ask(), self._copy
        with _errors(self.name), node.lock:
            watched = watch(copy)
            files = list_files(copy, strict=True)
            hashes = {file.path: hashlib.blake2b() for file in files}
            size_bytes = sum(file.size_bytes for file in files)
            check_announced(len(files), size_bytes)
            node.stream.send(Commit(self.name, len(files), size_bytes))
            try:
                send_files(
                    node.stream,
                    copy,
                    files,
                    node.stream.answered,
                    lambda file, block: hashes[file.path].update(block),
                    open_unseen,
                )
            except (OSError, FleetError):
                node.stream.receive()  # the node's answer to the abort
                raise
            self._version = _done(node.stream.receive())
        sent = {file.path: (file.executable, hashes[file.path].digest()) for file in files}
        self._committed = Committed(sent, watched)
        return self._version

    def reload(self) -> int:
        """Gets the newest version into the scratch space, for a volume that is declared as writable; returns its
        number.

        Raises:
            VolumeError: A call writes the volume, the scratch space is full, or the store cannot be reached.
        """
        self._begin("reloaded")
        try:
            if self._stale:
                self._fetch(again=True)
            self._fetch()
            return self._version
        finally:
            self._writing.release()

    def _fetch(self, *, again: bool = False) -> None:
        """Gets the newest version; `again`: the one that the node takes for this worker's. Errors: VolumeError."""
        node = self._ask()
        with _errors(self.name), node.lock:
            node.stream.send(Reload(self.name, again))
            answer = node.stream.receive()
            if not isinstance(answer, Incoming):
                self._version = _done(answer)
                return
            folder = self._received(node, answer)
            self._version, self._stale = _done(node.stream.receive()), False
        self._replace(folder)

    def _received(self, node: _Node, incoming: Incoming) -> Path:
        """The folder with the files that come. Where it fails, the rest is read up to its end: other volumes have the
        same stream. Errors: VolumeError, FleetError, OSError, StreamClosed."""
        folder = self._scratch()
        try:
            self._require_room(incoming.size_bytes)
            receive_files(node.stream, folder, incoming.files, incoming.size_bytes)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, TransferAborted):
                _done(node.stream.receive())  # says why
            elif isinstance(error, VolumeError | FleetError | OSError):
                discard_files(node.stream, incoming.size_bytes + incoming.files * FILE_MESSAGE_BYTES)
                _done(node.stream.receive())
                self._stale = True
            else:
                node.close()
            raise
        return folder

    def _begin(self, verb: str) -> None:
        if not self._write:
            raise VolumeError(
                f'volume {self.name} is read-only in this function: volumes=["{self.name}:{WRITE}"] lets it be {verb}'
            )
        if not self._writing.acquire(blocking=False):
            raise VolumeError(f"volume {self.name} is being written by another call of this worker: set concurrency=1")

    def _copied(self) -> Path:
        if self._stale:
            raise VolumeError(
                f"volume {self.name} is version {self._version} here, and what is written now would replace a newer "
                "one that this worker could not get: reload() it first"
            )
        files = list_files(self.path)
        self._require_room(sum(file.size_bytes for file in files))
        copy = self._scratch()
        try:
            for file in files:
                target = copy / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / file.path, target)
                target.chmod(0o755 if file.executable else 0o644)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise VolumeError(f"volume {self.name} cannot be copied: {error}") from error
        return copy

    def _require_room(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
        if needed_bytes > free_bytes:
            raise VolumeError(
                f"volume {self.name} has {needed_bytes:,} bytes, and the worker's scratch space {free_bytes:,} free: "
                "it is a quarter of the function's memory, so raise memory"
            )

    def _scratch(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"volume-{self.name}-"))

    def _replace(self, folder: Path) -> None:
        former, self._own = self._own, folder
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)


class _Node:
    """The worker's end of the stream to its node."""

    def __init__(self, sock: socket) -> None:
        self.stream = VolumeStream(sock)
        self.lock = threading.Lock()

    def close(self) -> None:
        """Ends the stream: a transfer that was left in the middle cannot be followed by another one."""
        self.stream.close()


_volumes: dict[str, Volume] = {}


def volume(name: str) -> Volume:
    """A volume of this function, by its name.

        @function(volumes=["index"])
        def search(query: str) -> list[str]:
            return lookup(volume("index").path / "titles.txt", query)

    Raises:
        VolumeError: The function does not name it.
    """
    found = _volumes.get(name)
    if found is None:
        there = ", ".join(sorted(_volumes)) or "none"
        raise VolumeError(f'this function has no volume {name!r} (it has {there}): @function(volumes=["{name}"])')
    return found


def provide_volumes(mounted: list[tuple[MountedVolume, str]], sock: socket | None) -> None:
    """Gives the worker its volumes, each with the folder in which it sees it, and its stream to the node."""
    node = _Node(sock) if sock is not None else None

    def ask() -> _Node:
        if node is None:
            raise VolumeError("this worker cannot write volumes")
        return node

    _volumes.clear()
    _volumes.update({one.name: Volume(one, folder, ask) for one, folder in mounted})


def _done(answer: Message | bytes) -> int:
    if not isinstance(answer, Done):
        raise StreamClosed("the node's answer was expected")
    if answer.error is not None:
        raise _error(answer.error)
    return answer.version


def _error(info: ErrorInfo) -> VolumeError:
    text = f"{info.message}: {info.hint}" if info.hint else info.message
    return VolumeConflict(text) if info.code == Conflict.code else VolumeError(text)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except FleetError as error:
        raise _error(error.info()) from error
    except TransferAborted as error:
        raise VolumeError(f"volume {name}: the node could not send the newest version") from error
    except StreamClosed as error:
        raise VolumeError(f"volume {name}: the node no longer answers: {error}") from error
    except OSError as error:
        raise VolumeError(f"volume {name}: {error}") from error
