"""Network of a bed: hosts are network namespaces, joined by a bridge, each with a link of a known rate.

Nothing of the machine is touched. The namespaces have no names: descriptors of this process hold them, and the kernel
removes them, with every device in them, once all are closed. The bridge is in one of its own. A host's link is a pair
of veth devices, `eth0` in the host and `p0`, `p1`... on the bridge, and the end that sends is limited in each
direction by a token bucket. Its queue is short, so that a busy link delays others by `QUEUE_S`, not by seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

QUEUE_S = 0.015
"""Longest that a packet waits for a limited link: about what switches and cards of a data centre hold."""
HOST_QUEUE_S = 0.25
"""The same of a host in front of its own link. TCP keeps that queue far shorter, for a host holds back who sends and
loses nothing: what it did drop would not count as lost on the way. If it is all that an idle connection sends, nothing
is under way that could be acknowledged, and TCP tries again after 0.2 s, by its persist timer."""
BURST_S = 0.004
"""What a link that was idle sends at once: makes up for a kernel whose timers are late, as on a busy machine."""
BURST_BYTES_LEAST = 48 * 1024
GSO_BYTES = 16 * 1024
"""Largest packet that is handed down whole. More costs less processor time, and makes a slow link uneven."""
SINK = "02:00:00:00:00:01"
"""Address of the bridge itself, which forwards nothing that is sent to it: where traffic goes that is to be lost."""
TUNING = {"tcp_congestion_control": ("cubic", "reno"), "tcp_no_metrics_save": ("1",)}
"""What fills a link on every machine, the first that the kernel lets a namespace have: it allows all of them reno, and
else what the machine itself may use. Each connection is as if it were the first."""
TOOLS = ("ip", "tc", "nsenter")
COMMAND_S = 20
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoNamespaces(Exception):
    """This machine, or this user, cannot have them; the message says why."""


class NotDone(Exception):
    """`ip` or `tc` refused; the message has what was asked and what it said."""


@functools.cache
def why_not() -> str:
    """Why there can be no test bed here; empty if there can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: apt install iproute2 util-linux)"
    try:
        tried = Network(["a"], prefix="10.77.0")
        try:
            tried.limit("a", 100)
        finally:
            tried.close()
    except (NoNamespaces, NotDone) as error:
        return str(error)
    return ""


class Network:
    """Hosts by name; the first has the address `{prefix}.1`. Not thread-safe, but for `socket`."""

    def __init__(self, names: Sequence[str], *, prefix: str) -> None:
        self.addresses = {name: f"{prefix}.{number}" for number, name in enumerate(names, 1)}
        bridge, *hosts = _in_new_thread(lambda: _namespaces(len(names) + 1))
        self._bridge: int = bridge
        self._hosts = dict(zip(names, hosts, strict=True))
        self._ports = {name: f"p{number}" for number, name in enumerate(names)}
        self._cut: set[frozenset[str]] = set()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        lines = [
            f"link add br0 address {SINK} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            "link set br0 addrgenmode none up",
        ]
        for name, port in self._ports.items():
            lines += [
                f"link add {port} type veth peer name eth0 netns {_path(self._hosts[name])}",
                f"link set {port} master br0 addrgenmode none gso_max_size {GSO_BYTES} up",
            ]
        self._ip(self._bridge, *lines)
        for name, host in self._hosts.items():
            self._ip(
                host,
                "link set lo up",
                f"link set eth0 addrgenmode none gso_max_size {GSO_BYTES} up",
                f"address add {self.addresses[name]}/24 dev eth0",
            )

    def close(self) -> None:
        """The namespaces go when the last process in them has ended."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._bridge, self._hosts = -1, {}

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the namespaces."""
        return [self._bridge, *self._hosts.values()] if self._bridge >= 0 else []

    @property
    def namespaces(self) -> dict[int, str]:
        """Inode of each namespace → its host, or "bridge": what /proc/PID/ns/net shows."""
        found = {os.fstat(descriptor).st_ino: name for name, descriptor in self._hosts.items()}
        return found | {os.fstat(self._bridge).st_ino: "bridge"} if self._bridge >= 0 else found

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────

    def entered(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command as run on that host. The process keeps its number, its control groups and its /sys."""
        return _entered(self._hosts[name], argv)

    def socket(self, name: str) -> socket.socket:
        """A TCP socket of that host, to connect or to bind from here."""

        def make() -> socket.socket:
            if _LIBC.setns(self._hosts[name], _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {name}")
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)

        return _in_new_thread(make)

    # ── links ──────────────────────────────────────────────────────────────────────────────────────

    def limit(self, name: str, mbit: float) -> None:
        """Rate of the host's link, each way; 0 is none."""
        ends = ((self._hosts[name], "eth0", HOST_QUEUE_S), (self._bridge, self._ports[name], QUEUE_S))
        for namespace, device, queue_s in ends:
            queue = bucket(mbit, queue_s) if mbit else "pfifo limit 1000"
            self._tc(namespace, f"qdisc replace dev {device} root {queue}")

    def cut(self, name: str) -> None:
        """Cuts the host's link, as if the cable were pulled: what is sent is lost without an error."""
        self._ip(self._bridge, f"link set {self._ports[name]} down")

    def mend(self, name: str) -> None:
        self._ip(self._bridge, f"link set {self._ports[name]} up")

    def cut_between(self, one: str, other: str) -> None:
        """Cuts two hosts from each other, both ways and without an error; they reach all others."""
        for here, there in ((one, other), (other, one)):
            wrong = f"{self.addresses[there]} lladdr {SINK} dev eth0 nud permanent"
            self._ip(self._hosts[here], f"neighbour replace {wrong}")
        self._cut.add(frozenset((one, other)))

    def mend_between(self, one: str, other: str) -> None:
        if frozenset((one, other)) not in self._cut:
            return
        self._cut.remove(frozenset((one, other)))
        for here, there in ((one, other), (other, one)):
            self._ip(self._hosts[here], f"neighbour del {self.addresses[there]} dev eth0")

    def _ip(self, namespace: int, *lines: str) -> None:
        _batch(namespace, "ip", lines)

    def _tc(self, namespace: int, *lines: str) -> None:
        _batch(namespace, "tc", lines)


def bucket(mbit: float, queue_s: float = QUEUE_S) -> str:
    """Token bucket of a link, as `tc` takes it, and its queue."""
    bytes_per_s = mbit * 1e6 / 8
    burst_bytes = max(BURST_BYTES_LEAST, round(bytes_per_s * BURST_S))
    queue_bytes = max(BURST_BYTES_LEAST, round(bytes_per_s * queue_s))
    return f"tbf rate {round(mbit * 1e6)}bit burst {burst_bytes} limit {queue_bytes}"


def _namespaces(count: int) -> list[int]:
    """Descriptors of new ones. Leaves the thread that calls it in the last."""
    made: list[int] = []
    try:
        for _ in range(count):
            if _LIBC.unshare(_CLONE_NEWNET) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise NoNamespaces(f"no network namespaces: {reason} (it takes root, or CAP_SYS_ADMIN)")
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            for name, values in TUNING.items():
                _tune(Path(f"/proc/sys/net/ipv4/{name}"), values)
    except BaseException:
        for descriptor in made:
            os.close(descriptor)
        raise
    return made


def _tune(setting: Path, values: Sequence[str]) -> None:
    """Writes the first value that the kernel takes; where it takes none, it stays as everywhere on this machine."""
    for value in values:
        with contextlib.suppress(OSError):
            setting.write_text(value)
            return


def _in_new_thread(function: Callable[[], Value]) -> Value:
    """A namespace is a thread's own: one that ends takes its own with it, and this one stays where it is."""
    values: list[Value] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return values[0]


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _entered(namespace: int, argv: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net={_path(namespace)}", "--", *argv]


def _batch(namespace: int, tool: str, lines: Sequence[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    argv = _entered(namespace, [tool, "-batch", "-"])
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode != 0:
        raise NotDone(f"{tool}: {' '.join(done.stderr.split())}; it was asked for: {'; '.join(lines)}")
