"""Containers of one node, from their making to their removal: created, started, paused, taken, ended.

`ContainerStock` keeps those that are ready ahead of launches, as `container_pool` decides, in a thread of its own:
the engine takes a third of a second for one. A container that was taken is never put back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..isolation.root import Mount, name_files
from .base_image import OWN_DIR
from .carried_python import CarriedPython
from .container_engine import ContainerEngine, ContainerPlan, UserImage
from .container_pool import PAUSED_MOST, Backoff, PoolKey, PoolTargets, may_refill, targets
from .container_worker import CONTROL_PATH, MESSAGE_MAX, WARM
from .launcher import has_ended

CONNECT_TIMEOUT_S = 20.0
"""Limit from the start of a container until its Python has connected, generous for a busy machine."""
WARM_TIMEOUT_S = 60.0
"""Limit for the imports of a profile."""
TICK_S = 0.5
CREATED = "created"
"""Name of the generic containers that are created and not started, where each pool has one."""
REMEMBERED_LAUNCHES = 64
NO_RUNTIME_GPUS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Variable of NVIDIA's container runtime, which gives a container the GPUs that its image asks for by it: often all of
the node. Those that a function asked for are requested of the engine itself."""


@dataclass(slots=True)
class Container:
    """One container, by the engine's id. `folder` is mounted into it, with its control socket."""

    id: str
    name: str
    user: int
    folder: Path
    listener: socket.socket
    pid: int = 0
    pidfd: int = -1
    connection: socket.socket | None = None

    def close(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerKind:
    """What all containers of a node have in common."""

    node: str
    image: str
    shown: tuple[Mount, ...]
    environment: Mapping[str, str]
    python: str
    folder: Path
    """Folder of the containers' own folders; no other user of the machine may enter it."""
    users: range
    """User ids, one for each container that lives; empty: all are the system's nobody."""
    carried: CarriedPython | None = None
    """This Python for images of users; None: it cannot be carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """What a container has that others of its node have not."""

    image: UserImage | None = None
    network: bool = False
    gpus: tuple[str, ...] = ()

    @property
    def fits_all(self) -> bool:
        """True if a container of a pool will do, which was made before its function was known."""
        return not (self.network or self.gpus)

    @property
    def image_id(self) -> str:
        return self.image.id if self.image is not None else ""


GENERIC = ContainerRequest()


NOBODY = 65534


class ContainerFactory:
    """Makes containers of one kind. Used by the launcher's loop and by the thread that refills its pools."""

    def __init__(self, engine: ContainerEngine, kind: ContainerKind) -> None:
        self.engine = engine
        self._kind = kind
        self._lock = threading.Lock()
        self._users = deque(kind.users)
        self._made = 0

    def create(self, request: ContainerRequest = GENERIC) -> Container:
        """Creates a container that has not been started. Errors: OSError."""
        command, shown, environment = self._inside(request)
        with self._lock:
            self._made += 1
            name = f"fs-{os.getpid()}-{self._made}-{os.urandom(3).hex()}"
            if self._kind.users and not self._users:
                raise OSError(f"all {len(self._kind.users):,} user ids for containers are in use (FS_ISOLATION_UIDS)")
            user = self._users.popleft() if self._kind.users else NOBODY
        folder = self._kind.folder / name
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            folder.mkdir(mode=0o755)
            for file, text in name_files(name, user).items():
                if file in ("passwd", "group"):
                    (folder / file).write_text(text)
            # By the descriptor of the folder: a socket's path has 107 characters at most.
            with _opened(folder) as place:
                listener.bind(f"/proc/self/fd/{place}/{os.path.basename(CONTROL_PATH)}")
            os.chmod(folder / os.path.basename(CONTROL_PATH), 0o666)
            listener.listen(1)
            plan = ContainerPlan(
                name=name,
                image=request.image_id or self._kind.image,
                command=command,
                environment=environment,
                user=user,
                shown=(*shown, Mount(OWN_DIR, str(folder))),
                node=self._kind.node,
                launcher=str(self._kind.folder),
                network=request.network,
                volumes=request.image.volumes if request.image is not None else (),
                gpus=request.gpus,
            )
            return Container(self.engine.create(plan), name, user, folder, listener)
        except BaseException:
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)
            self._give_back(user)
            raise

    def _inside(self, request: ContainerRequest) -> tuple[tuple[str, ...], tuple[Mount, ...], Mapping[str, str]]:
        """Command, mounts and environment of a container. Errors: OSError."""
        kind = self._kind
        if request.image is None:
            command = (kind.python, "-m", "fleetstart.runtime.launch.container_worker")
            return command, kind.shown, {**kind.environment, **NO_RUNTIME_GPUS}
        if kind.carried is None:
            raise OSError("this node's Python cannot be carried into images")
        return kind.carried.command, kind.carried.mounts, NO_RUNTIME_GPUS

    def start(self, container: Container, profile: str) -> None:
        """Starts a container and lets its Python import a profile. Errors: OSError."""
        container.pid = self.engine.start(container.id)
        try:
            container.pidfd = os.pidfd_open(container.pid)
            container.connection = self._accept(container)
            container.connection.send(profile.encode())
        except OSError as error:
            said = ""
            with contextlib.suppress(OSError):
                said = self.engine.last_words(container.id)
            raise OSError(f"a container did not begin to work: {said or error}") from error

    def remove(self, container: Container) -> None:
        """Ends and removes a container. Errors: OSError, and then it is to be tried again."""
        self.engine.remove(container.id)
        container.close()
        self._give_back(container.user)

    def remove_all(self) -> None:
        """Removes all containers that were made here and not removed. Errors: OSError."""
        self.engine.remove_all(self._kind.node, str(self._kind.folder))

    def remove_folder(self) -> None:
        """Removes the containers' own folders, and that of the node if no other launcher has one in it."""
        shutil.rmtree(self._kind.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._kind.folder.parent.rmdir()

    def _give_back(self, user: int) -> None:
        with self._lock:
            if self._kind.users:
                self._users.append(user)

    def _accept(self, container: Container) -> socket.socket:
        """The connection of the container's own first process."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        container.listener.settimeout(TICK_S)
        while True:
            try:
                connection, _ = container.listener.accept()
                break
            except TimeoutError:
                if has_ended(container.pidfd) or time.monotonic() > deadline:
                    raise OSError("its first process has ended, or did not connect") from None
        container.listener.close()
        os.unlink(container.folder / os.path.basename(CONTROL_PATH))
        return connection


def await_warm(container: Container) -> None:
    """Waits until a started container has imported its profile. Errors: OSError."""
    assert container.connection is not None
    container.connection.settimeout(WARM_TIMEOUT_S)
    if container.connection.recv(MESSAGE_MAX) != WARM:
        raise OSError("a container ended while it imported its profile")


@dataclass(slots=True)
class _Stocked:
    created: deque[Container] = field(default_factory=deque)
    paused: dict[PoolKey, deque[Container]] = field(default_factory=dict)
    ended: deque[Container] = field(default_factory=deque)
    """To be removed."""


class ContainerStock:
    """Containers ready for launches. `run` keeps it filled, in a thread."""

    def __init__(self, factory: ContainerFactory) -> None:
        self.engine = factory.engine
        self._factory = factory
        self._stocked = _Stocked()
        self._launches: dict[PoolKey, deque[float]] = {}
        self._images: dict[str, UserImage] = {}
        """Users' images by their ids."""
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._ending = False

    def take(self, profile: str, image: UserImage | None = None) -> Container:
        """A started container that has the profile, or imports it; the soonest there is. Errors: OSError."""
        request = ContainerRequest(image=image)
        pool = PoolKey(profile, request.image_id)
        with self._lock:
            self._launches.setdefault(pool, deque(maxlen=REMEMBERED_LAUNCHES)).append(time.monotonic())
            if image is not None:
                self._images[image.id] = image
        while (container := self._pop(lambda stocked: stocked.paused.get(pool))) is not None:
            try:
                self.engine.unpause(container.id)
                if not has_ended(container.pidfd):
                    return container
            except OSError as error:  # the engine was killed meanwhile, and what it had with it
                sys.stderr.write(f"a container that waited is of no use: {error}\n")
            self.discard(container)
        container = self._pop(lambda stocked: stocked.created) if image is None else None
        if container is not None:
            try:
                self._factory.start(container, profile)
                return container
            except OSError as error:
                sys.stderr.write(f"a container that was created does not start, making another: {error}\n")
                self.discard(container)
        return self.fresh(profile, request)

    def fresh(self, profile: str, request: ContainerRequest = GENERIC) -> Container:
        """A container that is made for this launch. Errors: OSError."""
        container = self._factory.create(request)
        try:
            self._factory.start(container, profile)
        except BaseException:
            self.discard(container)
            raise
        return container

    def discard(self, container: Container) -> None:
        """Has a container removed, soon."""
        with self._lock:
            self._stocked.ended.append(container)
        self._woken.set()

    def run(self) -> None:
        """Removes containers that have ended and refills the pools, until `end`. What fails is tried again after a
        pause of its own, in which all else goes on."""
        while not self._ending:
            if not self._step(time.monotonic()):
                self._woken.wait(TICK_S)
                self._woken.clear()

    def end(self, refilling: threading.Thread) -> None:
        """Removes all containers that were made here, and ends the thread of `run`. What the thread waits for ends with
        its container; one that it makes meanwhile is removed after it."""
        self._ending = True
        self._woken.set()
        while True:
            with contextlib.suppress(OSError):
                self._factory.remove_all()
            if not refilling.is_alive():
                break
            refilling.join(TICK_S)
        self._factory.remove_folder()

    def _pop(self, of: Callable[[_Stocked], deque[Container] | None]) -> Container | None:
        with self._lock:
            found = of(self._stocked)
            return found.popleft() if found else None

    def _step(self, now_s: float) -> bool:
        """Does one thing, if there is one to do."""
        found = self._next(now_s)
        if found is None:
            return False
        what, action = found
        try:
            action()
        except OSError as error:
            sys.stderr.write(f"to be tried again, for the pools of containers: {error}\n")
            self._backoff.failed(what, time.monotonic())
        else:
            self._backoff.succeeded(what)
        return True

    def _next(self, now_s: float) -> tuple[PoolKey | str, Callable[[], None]] | None:
        """What to do now, if anything, after the name by which it is remembered if it fails."""
        with self._lock:
            wanted = targets(self._launches, now_s)
            self._drop_unneeded(wanted)
            for ended in self._stocked.ended:
                if self._backoff.may_try(ended.id, now_s):
                    return ended.id, partial(self._remove, ended)
            if may_refill(self._launches, now_s):
                for pool, least in wanted.paused.items():
                    if self._paused(pool) < least and self._backoff.may_try(pool, now_s):
                        return pool, partial(self._stock, pool)
                if len(self._stocked.created) < wanted.created and self._backoff.may_try(CREATED, now_s):
                    return CREATED, self._create
        return None

    def _remove(self, container: Container) -> None:
        self._factory.remove(container)
        with self._lock:
            self._stocked.ended.remove(container)

    def _create(self) -> None:
        made = self._factory.create()
        with self._lock:
            self._stocked.created.append(made)

    def _paused(self, pool: PoolKey) -> int:
        return len(self._stocked.paused.get(pool, ()))

    def _stock(self, pool: PoolKey) -> None:
        """Makes one more paused container."""
        if pool.image:
            container = self._factory.create(ContainerRequest(image=self._images[pool.image]))
        else:
            container = self._pop(lambda stocked: stocked.created) or self._factory.create()
        try:
            self._factory.start(container, pool.profile)
            await_warm(container)
            self.engine.pause(container.id)
        except BaseException:
            self.discard(container)
            raise
        with self._lock:
            self._stocked.paused.setdefault(pool, deque(maxlen=2 * PAUSED_MOST)).append(container)

    def _drop_unneeded(self, wanted: PoolTargets) -> None:
        """Drops paused containers that are too many, and those that have ended: the engine was started again, or its
        operator removed them. The lock is held."""
        for pool, waiting in self._stocked.paused.items():
            surplus = max(0, len(waiting) - wanted.paused.get(pool, 0))
            for place, container in enumerate(list(waiting)):
                if place < surplus or has_ended(container.pidfd):
                    waiting.remove(container)
                    self._stocked.ended.append(container)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
