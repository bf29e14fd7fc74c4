"""Container launcher: starts each worker as a container of an engine that the machine has (Docker, Podman).

It speaks the fork server's protocol (`launcher`) with the daemon and the Docker API with the engine. Containers are
generic and made ahead (`containers`): one is given its worker's descriptors over its control socket, serves one
function, and is removed. The engine confines it; the daemon's control groups hold its memory, as they do for all.

Containers outlive their launcher, so it outlives its daemon for a moment, however that ended, and removes what it made.
Should it be killed itself, the control sockets end its workers, and the node's next launcher removes what is left, by
its label.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.ids import WorkerId
from ..contract.node.messages import Fork, LauncherReady
from ..contract.process.program import run_program
from ..isolation import linux
from ..isolation.root import plan_for_this_python
from .base_image import base_image, shown_mounts
from .carried_python import NoLoader, plan_carried, this_interpreter
from .launcher import LaunchedWorker, LaunchRefused, begin, refuse, serve
from .profiles import worker_environment

if TYPE_CHECKING:
    from .container_engine import UserImage
    from .containers import Container, ContainerStock

NAME = "container"
KILLED = -9
"""Exit status of a worker whose engine cannot tell: it was killed with it."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Engines' names for what kernels call otherwise."""
CDI_ADVICE = (
    "the engine must know the Container Device Interface (Docker 25 or newer), and the machine must have its "
    "specification: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
)
RETRY_S = 3.0
"""Pause between looks for an engine that was not there at the start."""


class ContainerLauncher:
    """Launcher of containers from a stock of them."""

    def __init__(self, stock: ContainerStock) -> None:
        self._stock = stock
        self._running: dict[str, Container] = {}
        self._images: dict[str, tuple[str, str]] = {}
        """Name and id of each running worker's image, if it is a user's."""

    def describe(self, *, network: bool) -> str:
        return NAME if network else f"{NAME},net"

    def launch(self, fork: Fork, control_fd: int, log_fd: int) -> LaunchedWorker:
        from .containers import ContainerRequest  # late, as the stock's own module

        image = self._find_image(fork.image) if fork.image else None
        request = ContainerRequest(image=image, network=fork.network, gpus=tuple(fork.gpus))
        try:
            own = None if request.fits_all else self._stock.fresh(fork.profile, request)
        except OSError as error:
            if fork.gpus and "cdi" in str(error).lower():
                raise LaunchRefused(f"no container can have the GPUs: {error}", CDI_ADVICE) from error
            raise
        container = own or self._stock.take(fork.profile, image)
        try:
            for path in fork.cgroup_procs:
                Path(path).write_text(str(container.pid))
            assert container.connection is not None
            container.connection.settimeout(None)
            # Kept open until the end: closed with an answer unread, it would take what was sent with it.
            socket.send_fds(container.connection, [b"worker"], [control_fd, log_fd])
            launched = LaunchedWorker(fork.worker, container.pid, os.dup(container.pidfd))
        except BaseException:
            self._stock.discard(container)
            raise
        self._running[fork.worker] = container
        if image is not None:
            self._images[fork.worker] = fork.image, image.id
        return launched

    def is_current(self, worker: WorkerId) -> bool:
        """True if the image of a running worker is still the one that its name means; False also if the engine cannot
        tell."""
        if worker not in self._images:
            return worker in self._running
        name, id = self._images[worker]
        with contextlib.suppress(OSError):
            found = self._stock.engine.find_image(name)
            return found is not None and found.id == id
        return False

    def _find_image(self, name: str) -> UserImage:
        """A user's image. Errors: OSError; LaunchRefused, if no container of it could run here."""
        image = self._stock.engine.find_image(name)
        if image is None:
            raise LaunchRefused(
                f"the image {name} is not on the engine of this node",
                f"images are not pulled: load it there, with `docker pull {name}` or `docker load`",
            )
        if image.architecture != ARCHITECTURES.get(os.uname().machine, os.uname().machine):
            raise LaunchRefused(
                f"the image {name} is for {image.architecture}, and this node is {os.uname().machine}",
                "build it for this machine, or name nodes that it is for by region",
            )
        return image

    def reap(self, child: LaunchedWorker) -> int:
        """Has a container removed whose worker has ended. The engine reports signals as 128 + number."""
        container = self._running.pop(child.worker)
        self._images.pop(child.worker, None)
        try:
            code = self._stock.engine.exit_code(container.id)
        except OSError as error:
            sys.stderr.write(f"how worker {child.worker} ended is not known: {error}\n")
            return KILLED
        finally:
            self._stock.discard(container)
        return 128 - code if code > 128 else code


def open_stock(address: str, state: Path, hide: Iterable[str], users: range) -> ContainerStock:
    """A stock whose engine has been tried: one container was started and ended. Errors: OSError."""
    try:
        from .container_engine import ContainerEngine  # late: the Docker client is an extra
        from .containers import ContainerFactory, ContainerKind, ContainerStock
    except ImportError as error:
        raise OSError(f"the client of container engines is not installed (pip install docker): {error}") from error
    engine = ContainerEngine(address)
    engine.version()
    node = str(state.absolute())
    if left := engine.remove_all(node):
        sys.stderr.write(f"removed {left} containers that this node had left when it was killed\n")
    shutil.rmtree(state, ignore_errors=True)
    own = state / f"{os.getpid()}-{os.urandom(4).hex()}"  # the launcher before this one may still be ending
    own.mkdir(mode=0o700, parents=True)
    plan = plan_for_this_python(hide, os.environ.get("LD_LIBRARY_PATH", ""))
    image, data = base_image(plan)
    engine.ensure_image(image, data)
    try:
        carried = plan_carried(this_interpreter(os.environ.get("LD_LIBRARY_PATH", "")))
    except NoLoader as error:
        sys.stderr.write(f"functions with an image of their own cannot run here: {error}\n")
        carried = None
    kind = ContainerKind(
        node=node,
        image=image,
        shown=shown_mounts(plan),
        environment=worker_environment(os.environ),
        python=os.path.join(os.path.realpath(sys.prefix), "bin", os.path.basename(sys.executable)),
        folder=own,
        users=users,
        carried=carried,
    )
    stock = ContainerStock(ContainerFactory(engine, kind))
    stock.discard(stock.fresh("python"))
    return stock


def await_engine(address: str) -> None:
    """Ends this process once an engine answers that did not at the start: the daemon starts another launcher."""
    try:
        from .container_engine import ContainerEngine
    except ImportError:
        return
    while True:
        time.sleep(RETRY_S)
        with contextlib.suppress(OSError):
            ContainerEngine(address).version()
            os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="fleetstart.runtime.launch.container", description="Starts workers as containers."
    )
    parser.add_argument("--fd", type=int, required=True, help="this side of the socketpair with the daemon")
    parser.add_argument("--engine", required=True, metavar="URL", help="its API: unix:///run/docker.sock")
    parser.add_argument("--state", type=Path, required=True, help="folder of its own, emptied at the start")
    parser.add_argument("--hide", action="append", default=[], metavar="DIR", help="folder that no worker may see")
    parser.add_argument("--users", type=int, nargs=2, default=(0, 0), metavar=("FIRST", "END"), help="their user ids")
    options = parser.parse_args(arguments)
    sock = begin(options.fd)
    linux.die_with_parent(0)  # it ends by its socket, once it has removed its containers
    try:
        stock = open_stock(options.engine, options.state, options.hide, range(*options.users))
    except OSError as error:
        threading.Thread(target=await_engine, args=(options.engine,), daemon=True).start()
        refuse(sock, str(error))
        return
    refill = threading.Thread(target=stock.run, daemon=True)
    refill.start()
    try:
        launcher = ContainerLauncher(stock)
        serve(sock, launcher, LauncherReady(NAME, NAME), launcher.is_current)
    finally:
        stock.end(refill)


if __name__ == "__main__":
    run_program(main)
