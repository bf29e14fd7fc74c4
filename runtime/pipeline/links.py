"""Links of one stage to all others of its pipeline: one connection each way, with failure detection.

The node connects the sockets and opens the listener; here each link is authenticated, encrypted if it leaves the
machine, read by its own thread, and kept alive by pings. A process that dies closes its sockets, so the others notice
at once; a host or a cable that dies is noticed by its silence. Links that the node relays through the object store are
slower: they have longer intervals.
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

from ..contract.identity import Identity, stays_here
from ..contract.weights.stage import Stage
from .frames import Buffer, Hello, LinkBroken, Message, Ping, receive_frame, receive_hello, send_frame
from .link_encryption import LinkEncryption

log = logging.getLogger(__name__)

PING_EVERY_S = 0.2
SILENCE_S = 1.0
"""Silence after which a stage counts as lost: five pings, so that a busy machine loses none."""
RELAYED_FACTOR = 2.5
"""Factor of both for a link through the object store, where nodes retry a failed or late request for two seconds."""
HELLO_S = 2.0
"""Time for a stage to prove itself, TLS and greeting together."""
STRANGERS_MAX = 16
"""Connections that have not proved themselves, of which each has a thread. One more closes the oldest: a stage needs
milliseconds, so whoever floods the port seldom keeps one out."""
SEND_S = 5.0
"""Send timeout of one frame, for a stage that is alive but does not read."""
CLOSE_S = 1.0

OnFrame = Callable[[int, Message, bytearray], None]
OnLost = Callable[[int, str], None]


class StageLinks:
    """All links of one stage. Thread-safe. `on_frame` and `on_lost` are called with the other stage's index, in threads
    of this object; `on_lost` at most once a stage, and never after `close`."""

    def __init__(
        self,
        stage: Stage,
        secret: str,
        listener: socket.socket,
        on_frame: OnFrame,
        on_lost: OnLost,
        identity: Identity | None = None,
    ) -> None:
        """`identity`: the pipeline's own, for links that leave this machine; without it there are none."""
        self.stage = stage
        self._secret = secret
        self._encryption = LinkEncryption(identity) if identity is not None else None
        self._listener = listener
        listener.settimeout(None)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._others = [index for index in range(stage.count) if index != stage.index]
        self._changed = threading.Condition()
        self._out: dict[int, _OutgoingLink] = {}
        self._in: dict[int, socket.socket] = {}
        self._lost: dict[int, str] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Incoming connections that have not proved themselves, the oldest first."""
        self._shaking: dict[int, socket.socket] = {}
        """Outgoing connections whose other end has not proved itself."""
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._accept, "accept")
        self._start(self._ping, "ping")

    def connect(self, index: int, link: socket.socket) -> None:
        """Uses a connection to a stage for sending. A second one to the same stage is closed."""
        with self._changed:
            if self._closed or index in self._out or index in self._shaking or index not in self._others:
                link.close()
                return
            self._shaking[index] = link
        if _is_plain(link):
            self._connected(index, link)
        else:  # in a thread: the other stage answers once its worker is there
            _notice_lost_host(link)
            self._start(functools.partial(self._encrypt, index, link), "out")

    def _encrypt(self, index: int, link: socket.socket) -> None:
        try:
            if self._encryption is None:
                raise LinkBroken("it leaves this machine, and this worker has no key for such links")
            encrypted = self._encryption.as_client(link)
        except LinkBroken as error:
            link.close()
            self._lose(index, f"link to it: {error}")
        else:
            self._connected(index, encrypted)

    def _connected(self, index: int, link: socket.socket) -> None:
        with self._changed:
            self._shaking.pop(index, None)
            if self._closed:
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
        """Waits until all links are open or one is lost; False if the timeout is over first."""
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
            sockets += [*self._shaking.values(), *self._strangers]
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
        self._threads = [one for one in self._threads if one.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._changed:
                if len(self._strangers) >= STRANGERS_MAX:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut(oldest)  # its thread then ends, and closes it
                self._strangers[link] = None
            self._start(functools.partial(self._read, link), "in")

    def _read(self, accepted: socket.socket) -> None:
        known = self._authenticated(accepted)
        with self._changed:
            self._strangers.pop(accepted, None)
        if known is None:
            accepted.close()
            return
        hello, link = known
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

    def _authenticated(self, link: socket.socket) -> tuple[Hello, socket.socket] | None:
        """The greeting of an incoming connection, and the link over it; None if it is no stage of this pipeline, or
        one that is connected already."""
        ends_s = time.monotonic() + HELLO_S
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not _is_plain(link):
                if self._encryption is None:
                    raise LinkBroken("a link that leaves this machine, for which this worker has no key")
                link = self._encryption.as_server(link, HELLO_S)
            hello = receive_hello(link, ends_s - time.monotonic())
        except (LinkBroken, OSError) as error:
            log.debug("rejected a connection to a stage", extra={"error": str(error)})
            link.close()
            return None
        if hello.pipeline != self.stage.pipeline or hello.stage not in self._others or not self._has_secret(hello):
            link.close()
            return None
        with self._changed:
            if self._closed or hello.stage in self._in:
                link.close()
                return None
            self._in[hello.stage] = link
            self._changed.notify_all()
        return hello, link

    def _has_secret(self, hello: Hello) -> bool:
        same = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        if not same:
            log.warning("rejected a link with a wrong secret", extra={"stage": hello.stage})
        return same

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
        """True if the other end is the node, which relays frames through the object store."""
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


def _is_plain(link: socket.socket) -> bool:
    """True if a link needs no encryption: it stays on this machine. One that is closed already is in no danger."""
    try:
        return stays_here(link)
    except OSError:
        return True


def _notice_lost_host(link: socket.socket) -> None:
    """Breaks a connection whose host no longer answers, also while nothing is sent: about two seconds after its end."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(SILENCE_S * 1000))


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
