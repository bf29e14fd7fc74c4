"""Properties of the readers of what strangers and tenants send: requests, frames, events, archives, JSON bodies.

Each target reads any bytes to a valid result or to one of its own errors, and leaves nothing behind. Run like those of
`formats`: some hundred mutations in every test run, as many as one likes by `fuzz_formats`.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import re
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.server import ServerState

from fleetstart.controller.async_invocations.store.event_log import EventSplitter, error_of, without_id
from fleetstart.controller.auth.api_key import MalformedKey, new_key_text, parse_key
from fleetstart.controller.auth.authorize import key_in_headers
from fleetstart.controller.backup.file import BackupHeader, BackupInvalid, pack
from fleetstart.controller.backup.file import unpack as unpack_backup
from fleetstart.controller.http.asgi import Receive, Scope, Send
from fleetstart.controller.http.byte_range import NotSatisfiable, parse_range
from fleetstart.controller.http.connection_limits import ConnectionTable, LimitedHttpProtocol
from fleetstart.controller.http.headers import scoped_cookie
from fleetstart.prefetcher.layers.bundle_unpacking import unpack as unpack_bundle
from fleetstart.prefetcher.network.proxy_request import END, BadProxyRequest, parse_request
from fleetstart.runtime.contract.errors import ErrorInfo, FleetError
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.node.channel import PACKET_MAX_BYTES, Channel, ChannelClosed, pair
from fleetstart.runtime.contract.node.messages import StartError, WorkerMessage
from fleetstart.runtime.contract.node.volume_stream import FileHead, StreamClosed, VolumeStream
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.llm.server.requests import ChatCall
from fleetstart.runtime.openai_api.call_reader import CallReader
from fleetstart.runtime.pipeline.frames import KvRequest, LinkBroken, StageStep, receive_frame, send_frame
from tests.controller.backup.states import system

SIZE_BYTES = 1000
_CHAT = CallReader(ChatCall, "chat")


# ── the gateway's HTTP ─────────────────────────────────────────────────────────────────────────────


class _Client(asyncio.Transport):
    """The client's end of one connection: keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...


_requests: list[Scope] = []


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    _requests.append(scope)
    more = True
    while more:
        message = await receive()
        more = message["type"] == "http.request" and bool(message.get("more_body"))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


_CONFIG = uvicorn.Config(_app, http="httptools", ws="none", lifespan="off", interface="asgi3", log_config=None)
_CONFIG.load()
_LOOP = asyncio.new_event_loop()


def check_request(data: bytes) -> bool:
    """True if a request came to the app; then its head is one that no server behind could read in another way."""
    _requests.clear()

    async def converse() -> _Client:
        client = _Client()
        protocol = LimitedHttpProtocol(_CONFIG, ServerState(), {}, ConnectionTable(10))
        protocol.connection_made(client)
        for at in range(0, len(data), 700):
            if not client.closing:
                protocol.data_received(data[at : at + 700])
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return client

    client = _LOOP.run_until_complete(converse())
    assert not asyncio.all_tasks(_LOOP), "a request outlives its connection"
    assert not client.written or client.written.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), bytes(client.written[:40])
    for scope in _requests:
        names = [name for name, _ in scope["headers"]]
        assert all(re.fullmatch(rb"[!#$%&'*+.^_`|~0-9a-z-]+", name) for name in names), names
        assert not any(byte in value for _, value in scope["headers"] for byte in b"\r\n\0"), scope["headers"]
        assert names.count(b"content-length") <= 1, "two lengths"
        assert not (b"content-length" in names and b"transfer-encoding" in names), "two framings"
    return bool(_requests)


REQUEST = (
    b"POST /fn/hello?x=1 HTTP/1.1\r\nHost: a.example:8080\r\nContent-Type: application/json\r\nContent-Length: 7\r\n"
    b'Authorization: Bearer fs_x\r\nAccept: */*\r\n\r\n{"a":1}GET / HTTP/1.1\r\nHost: b\r\n'
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
)


# ── egress, events, frames ─────────────────────────────────────────────────────────────────────────


def check_proxy_request(data: bytes) -> bool:
    """True if the request is forwarded; then another parser reads the same head, and only what was meant to pass."""
    try:
        found = parse_request(data)
    except BadProxyRequest:
        return False
    assert 0 < found.port < 65536
    assert found.host
    assert not re.search(r"[\s/?#@]", found.host), found.host
    if found.forward:
        assert found.forward.endswith(END)
        assert found.forward.count(END) == 1, "a second request behind the first"
        names = [line.partition(b":")[0].lower() for line in found.forward.split(b"\r\n")[1:-2]]
        assert names.count(b"host") == 1
        assert names.count(b"connection") == 1
        assert b"proxy-authorization" not in names
        other = h11.Connection(h11.SERVER)
        try:
            other.receive_data(found.forward)
            request = other.next_event()
        except h11.RemoteProtocolError:
            return True  # refused by the next one: nobody reads it in another way
        assert isinstance(request, h11.Request)
    return True


def check_events(data: bytes) -> bool:
    """True if there are events: the same ones, however the stream was cut."""
    whole, pieces = EventSplitter(), EventSplitter()
    found = whole.feed(data) + whole.end()
    cut: list[bytes] = []
    for at in range(0, len(data), 5):
        cut += pieces.feed(data[at : at + 5])
    assert cut + pieces.end() == found
    for event in found:
        error_of(event)
        assert b"\nid:" not in b"\n" + without_id(event)
    return bool(found)


def check_frames(data: bytes) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data)
        theirs.close()
        ours.settimeout(1)
        read = False
        try:
            while True:
                receive_frame(ours)
                read = True
        except LinkBroken:
            return read


def _frames() -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        step = StageStep(number=3, positions=[4, 5], starts=[0, 2], tables=[[1, 2]], logits_rows=[1])
        send_frame(ours, step, bytes(64))
        send_frame(ours, KvRequest(4, [1, 2], 0, 9))
        return theirs.recv(1 << 16)


def check_worker_message(data: bytes) -> bool:
    """A packet on a worker's control socket, which the code of its tenant may write to as well."""
    ours, theirs = pair()
    channel: Channel[WorkerMessage] = Channel(ours, WorkerMessage, descriptors=1)
    try:
        theirs.send(data[:PACKET_MAX_BYTES])
        theirs.close()
        channel.receive()
    except ChannelClosed:
        return False
    finally:
        channel.close()
    return True


def check_volume_stream(data: bytes) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data)
        theirs.close()
        stream, read = VolumeStream(ours), False
        try:
            while True:
                stream.receive()
                read = True
        except StreamClosed:
            return read


def _volume_stream() -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = VolumeStream(ours)
        stream.send(FileHead(path="a/b.bin", size_bytes=9, executable=False))
        stream.send_data(bytes(9))
        return theirs.recv(1 << 16)


# ── archives ───────────────────────────────────────────────────────────────────────────────────────

_FOLDER = Path(tempfile.gettempdir()) / f"fleetstart-fuzz-{os.getpid()}"


def check_bundle(data: bytes) -> bool:
    """True if the bundle was unpacked; then into its folder alone, and into files and folders alone."""
    _FOLDER.mkdir(exist_ok=True)
    try:
        try:
            unpack_bundle(data, _FOLDER / "bundle")
        except FleetError:
            assert not list(_FOLDER.iterdir()), "a refused bundle leaves something"
            return False
        assert [path.name for path in _FOLDER.iterdir()] == ["bundle"]
        assert all(not path.is_symlink() and (path.is_file() or path.is_dir()) for path in _FOLDER.rglob("*"))
        return True
    finally:
        shutil.rmtree(_FOLDER)


def _bundle() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (("handler.py", b"x = 1\n"), ("a" * 120 + "/b.txt", b"hi"), ("sub/é", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()[: 512 * 12] + bytes(1024)


def check_backup(data: bytes) -> bool:
    try:
        unpack_backup(gzip.compress(data, 1))
    except BackupInvalid:
        return False
    return True


# ── requests of the API ────────────────────────────────────────────────────────────────────────────


def check_range(data: bytes) -> bool:
    try:
        found = parse_range(data.decode("latin-1"), SIZE_BYTES)
    except NotSatisfiable:
        return False
    assert found is None or 0 <= found[0] < found[0] + found[1] <= SIZE_BYTES
    return True


def check_authorization(data: bytes) -> bool:
    text = key_in_headers(data, None)
    if text is None:
        return False
    try:
        parse_key(text)
    except MalformedKey as error:
        told = str(error)
    else:
        return True
    assert len(text) < 8 or text not in told, "the error repeats the key"
    return False


def check_cookie(data: bytes) -> bool:
    """A handler's cookie, which is for its own path whatever it says."""
    scoped = scoped_cookie(data, b"/fn/hello")
    attributes = [part.strip().lower() for part in scoped.split(b";")[1:]]
    assert [one for one in attributes if one.startswith(b"path=")] == [b"path=/fn/hello"] or any(
        one.startswith(b"path=/fn/hello/") for one in attributes
    ), scoped
    assert not any(one.partition(b"=")[0].strip() == b"domain" for one in attributes), scoped
    return True


def check_spec(data: bytes) -> bool:
    try:
        spec = msgspec.json.decode(data, type=FunctionSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FleetError):
        return False
    assert msgspec.json.decode(msgspec.json.encode(spec), type=FunctionSpec) == spec
    return True


def check_chat(data: bytes) -> bool:
    try:
        call = _CHAT.read(data)
        call.limit()
        call.stops()
    except FleetError:
        return False
    return True


SPEC = msgspec.json.encode({
    "name": "ml.hello", "bundle": "0" * 64, "entry": "handler:run", "concurrency": 4, "env": {"A": "b"},
    "network": ["example.com:443", "10.0.0.0/8"], "schedule": "*/5 * * * *", "timezone": "Europe/Paris",
    "volumes": ["index@2", "cache:rw"], "secrets": ["TOKEN"], "calls": ["embed"], "tags": {"team": "x"},
    "scale": {"min": 0, "max": 3, "keep_alive_s": 60.0}, "slo": {"ttft_s": 1.0},
})  # fmt: skip
CHAT = msgspec.json.encode({
    "model": "chat", "max_tokens": 5, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.5}, "stream": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
})  # fmt: skip

_START_ERROR = StartError(ErrorInfo(code="x", message="why"), Timeline())
TARGETS = {
    "http-request": (check_request, REQUEST),
    "egress-request": (check_proxy_request, b"GET http://a.example:81/x?y HTTP/1.1\r\nHost: b\r\nAccept: */*" + END),
    "events": (
        check_events,
        b'id: 1\ndata: {"a":1}\n\nevent: error\ndata: {"error":{"code":"x"}}\r\n\r\n: c\r\rdata: 2',
    ),
    "frames": (check_frames, _frames()),
    "worker-message": (
        check_worker_message,
        msgspec.json.encode(StartError(ErrorInfo(code="x", message="why"), Timeline())),
    ),
    "volume-stream": (check_volume_stream, _volume_stream()),
    "bundle": (check_bundle, _bundle()),
    "backup": (check_backup, gzip.decompress(pack(BackupHeader(created_unix_ms=1, release="0", masters=[]), system()))),
    "range": (check_range, b"bytes=10-99"),
    "authorization": (check_authorization, f"Bearer {new_key_text().text}".encode()),
    "cookie": (check_cookie, b"sid=1; Path=/; Domain=a.example; HttpOnly; Max-Age=10"),
    "spec": (check_spec, SPEC),
    "chat": (check_chat, CHAT),
}
"""Each with bytes that it reads."""

WORDS: tuple[bytes, ...] = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b": ", b"Host: c\r\n", b"Content-Length: 3\r\n", b"%0d%0a",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"CONNECT a:1 HTTP/1.1", b"@", b"[::1]", b"#", b"..", b"/../",
    b"data:", b"event: ", b"id:", b"; Path=/x", b"; domain=", b"bytes=", b"-", b",", b"ustar",
    b"\xff\xff\xff\x7f", b"fs\x01\x00",
)  # fmt: skip
"""What readers of text protocols and archives have stumbled over."""
