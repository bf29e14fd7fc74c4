"""Links of one stage to all others of its pipeline: one connection each way, with failure detection.

The node connects the sockets and opens the listener; here each link is authenticated, read by its own thread, and kept
alive by pings. A process that dies closes its sockets, so the others notice at once; a host or a cable that dies is
noticed by its silence. Links that the node relays through the object store are slower: they have longer intervals.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..contract.weights.stage import Stage
from .frames import Buffer, Hello, LinkBroken, Message, Ping, receive_frame, send_frame

log = logging.getLogger(__name__)

PING_EVERY_S = 0.2
SILENCE_S = 1.0
"""Silence after which a stage counts as lost: five pings, so that a busy machine loses none."""
RELAYED_FACTOR = 2.5
"""Factor of both for a link through the object store, where nodes retry a failed or late request for two seconds."""
HELLO_S = 2.0
SEND_S = 5.0
"""Send timeout of one frame, for a stage that is alive but does not read."""
CLOSE_S = 1.0

OnFrame = Callable[[int, Message, bytearray], None]
OnLost = Callable[[int, str], None]


class StageLinks:
    """All links of one stage. Thread-safe. `on_frame` and `on_lost` are called with the other stage's index, in threads
    of this object; `on_lost` at most once a stage, and never after `close`."""

    def __init__(self, stage: Stage, secret: str, listener: socket.socket, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.stage = stage
        self._secret = secret
        self._listener = listener
        listener.settimeout(None)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._others = [index for index in range(stage.count) if index != stage.index]
        self._changed = threading.Condition()
        self._out: dict[int, _OutgoingLink] = {}
        self._in: dict[int, socket.socket] = {}
        self._lost: dict[int, str] = {}
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._accept, "accept")
        self._start(self._ping, "ping")

    def connect(self, index: int, link: socket.socket) -> None:
        """Uses a connection to a stage for sending. A second one to the same stage is closed."""
        with self._changed:
            if self._closed or index in self._out or index not in self._others:
                link.close()
                return
            outgoing = self._out[index] = _OutgoingLink(link)
        try:
            outgoing.send(Hello(self.stage.pipeline, self.stage.index, self._secret, relayed=outgoing.relayed))
        except LinkBroken as error:
            self._lose(index, f"link to it: {error}")
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether, within the timeout, all links are open or one is lost."""
        with self._changed:
            return self._changed.wait_for(lambda: self._standing or bool(self._lost) or self._closed, timeout_s)

    @property
    def _standing(self) -> bool:
        return all(index in self._out and index in self._in for index in self._others)

    def send(self, index: int, message: Message, payload: Buffer = b"") -> None:
        """Sends a frame to a stage. Errors: LinkBroken, after `on_lost`."""
        with self._changed:
            outgoing = self._out.get(index)
            if outgoing is None or index in self._lost:
                raise LinkBroken(f"stage {index} is lost: {self._lost.get(index, 'never connected')}")
        try:
            outgoing.send(message, payload)
        except LinkBroken as error:
            self._lose(index, f"link to it: {error}")
            raise

    def close(self) -> None:
        """Closes all links; returns when their threads have ended, except the calling one."""
        with self._changed:
            self._closed = True
            sockets = [outgoing.link for outgoing in self._out.values()] + list(self._in.values())
            self._changed.notify_all()
        for link in (self._listener, *sockets):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"links-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._start(functools.partial(self._read, link), "in")

    def _read(self, link: socket.socket) -> None:
        hello = self._receive_hello(link)
        if hello is None:
            link.close()
            return
        index, why = hello.stage, "closed"
        try:
            link.settimeout(SILENCE_S * (RELAYED_FACTOR if hello.relayed else 1))
            while True:
                message, payload = receive_frame(link)
                if not isinstance(message, Ping):
                    self._on_frame(index, message, payload)
        except LinkBroken as error:
            why = str(error)
        except Exception as error:
            log.exception("a frame could not be handled")
            why = f"{type(error).__name__}: {error}"
        self._lose(index, f"link from it: {why}")

    def _receive_hello(self, link: socket.socket) -> Hello | None:
        """The greeting of an incoming link; None if it is invalid or that stage is connected already."""
        try:
            link.settimeout(HELLO_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello, _ = receive_frame(link)
        except (LinkBroken, OSError):
            return None
        if not isinstance(hello, Hello) or hello.pipeline != self.stage.pipeline or hello.stage not in self._others:
            return None
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            log.warning("rejected a link with a wrong secret", extra={"stage": hello.stage})
            return None
        with self._changed:
            if self._closed or hello.stage in self._in:
                return None
            self._in[hello.stage] = link
            self._changed.notify_all()
        return hello

    def _lose(self, index: int, why: str) -> None:
        with self._changed:
            if self._closed or index in self._lost:
                return
            self._lost[index] = why
            self._changed.notify_all()
        self._on_lost(index, why)

    def _ping(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, PING_EVERY_S):
                    return
                quiet = [(index, outgoing) for index, outgoing in self._out.items() if index not in self._lost]
            for index, outgoing in quiet:
                try:
                    outgoing.ping(time.monotonic())
                except LinkBroken as error:
                    self._lose(index, f"link to it: {error}")


class _OutgoingLink:
    """One sending connection, with its pings."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(SEND_S)
        with contextlib.suppress(OSError):  # a Unix socket has no TCP options
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Detects an unreachable host by unacknowledged pings, also before its stage has sent anything.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(SILENCE_S * 1000))
        self.link = link
        self.relayed = link.family == socket.AF_UNIX
        """Whether the other end is the node, which relays frames through the object store."""
        self._ping_every_s = PING_EVERY_S * (RELAYED_FACTOR if self.relayed else 1)
        self._lock = threading.Lock()
        self._sent_s = time.monotonic()

    def send(self, message: Message, payload: Buffer = b"") -> None:
        with self._lock:
            send_frame(self.link, message, payload)
            self._sent_s = time.monotonic()

    def ping(self, now_s: float) -> None:
        """Sends a ping unless another frame was just sent or is being sent."""
        if now_s - self._sent_s >= self._ping_every_s and self._lock.acquire(blocking=False):
            try:
                send_frame(self.link, Ping())
                self._sent_s = now_s
            finally:
                self._lock.release()
