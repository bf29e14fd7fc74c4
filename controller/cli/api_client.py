"""Client of the management API: finds the server, decodes typed answers, raises the contract's errors.

The controller may restart during a call. Its listening socket stays open meanwhile, so the call waits and does not
fail; a call whose connection breaks is made again if that cannot do something twice.
"""

from __future__ import annotations

import shlex
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit

import click
import msgspec

from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.call_format import redirect_of
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import (
    ErrorBody,
    ErrorInfo,
    FleetError,
    Forbidden,
    NotFound,
    StoreFailed,
    TooLarge,
    Unauthorized,
    error_from,
)
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

from ..auth.owner_key_file import read_key_file
from ..http.head_errors import error_info_of
from ..schemas.functions import FunctionInfo
from .home import HomeLayout
from .output import NAMED_MAX, ConnectionCut, Unreachable, first_of
from .root import KEY_META

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer")

RETRY_S = 10.0
"""How long a request is retried: a restarted controller is back within 5 s."""
PAUSE_S = 0.1
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Address(NamedTuple):
    """URL of a server, and the API key for it."""

    url: str
    key: str = ""
    """Empty: none."""
    key_in: str = ""
    """Shell expression for the key: `$FS_KEY`, or `$(cat FILE)`."""


def find_server(url: str | None, home: Path) -> Address:
    """Address of the server: the URL given, or the one that `fs up` wrote. Its key is FS_KEY; for the server of this
    home, the home's key, which is sent to no other server."""
    layout = HomeLayout(home)
    try:
        own = layout.endpoint.read_text().strip()
    except OSError as error:
        if not url:
            raise Unreachable(
                "no server runs here", hint="start one with `fs up`, or name one with --url or FS_URL"
            ) from error
        own = ""
    if url and "://" not in url:
        url = "http://" + url
    url = url.rstrip("/") if url else own
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise no_url(url, error) from error
    context = click.get_current_context(silent=True)
    given = str(context.meta.get(KEY_META) or "") if context is not None else ""
    if given:
        return Address(url, given, "$FS_KEY")
    return _with_own_key(url, layout) if url == own else Address(url)


def no_url(url: str, error: Exception) -> click.UsageError:
    return click.UsageError(f"{url!r} is not the URL of a server: {error}; name one such as https://HOST:PORT")


def own_server(home: Path) -> Address:
    """Address of the server that `fs up` wrote, with the home's key if there is one, even if FS_KEY is set."""
    found = find_server(None, home)
    own = _with_own_key(found.url, HomeLayout(home))
    return own if own.key else found


def _with_own_key(url: str, layout: HomeLayout) -> Address:
    return Address(url, read_key_file(layout.key), f"$(cat {shell_path(layout.key)})")


def shell_path(path: Path) -> str:
    """The path quoted for a shell, beginning with ~ inside the user's folder."""
    user = Path.home()
    return f"~/{shlex.quote(str(path.relative_to(user)))}" if path.is_relative_to(user) else shlex.quote(str(path))


@contextmanager
def _left_out(module: str) -> Iterator[None]:
    """Makes imports of the module fail inside the block, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # as the import system has it: "not to be found"
    try:
        yield
    finally:
        del sys.modules[module]


def object_path(collection: str, name: str) -> str:
    """Path of one object of the management API. `app#old` is its whole name: unescaped, it would be `app`."""
    return f"/api/v1/{collection}/{quote(name, safe='')}"


def function_path(name: str) -> str:
    return object_path("functions", name)


class ApiClient:
    """HTTP client of one server. Also the UploadTarget of a deploy."""

    def __init__(self, address: Address | str, *, timeout_s: float = 30.0) -> None:
        # Late, as it is the largest import of the command line, and without a command line of its own.
        with _left_out("httpx._main"):
            import httpx
        url, key, _ = Address(address) if isinstance(address, str) else address
        self.url = url
        if not key.isascii() or not key.isprintable():
            raise Unauthorized("FS_KEY is not a key: it has characters that keys do not have")
        self._httpx = httpx
        self._cut = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
        local = urlsplit(url).hostname in LOOPBACK
        plain = urlsplit(url).scheme == "http"
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise no_url(url, error) from error
        # A proxy of the environment is for the world outside, never for this machine.
        self.http = httpx.Client(
            base_url=base,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            event_hooks={"response": [self._require_server]},
            trust_env=not local,
            # Without TLS nobody's certificate is read, and to load those of the world takes longer than the call.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else httpx.create_ssl_context(trust_env=True),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, path: str, kind: type[Answer], **query: str | int) -> Answer:
        return self._decoded(self.request_with_retry("GET", path, params=query), kind)

    def post(self, path: str, body: Any, kind: type[Answer], **query: str | int) -> Answer:
        headers = {"content-type": "application/json"}
        # Deploying the same spec twice gives the same version, so it may be repeated.
        response = self.request_with_retry(
            "POST", path, params=query, content=msgspec.json.encode(body), headers=headers
        )
        return self._decoded(response, kind)

    def send_once(self, method: str, path: str, body: Any, kind: type[Answer]) -> Answer:
        """Sends a request that must not be repeated: two rollbacks are not one."""
        headers = {"content-type": "application/json"}
        with self.connection_errors():
            return self._decoded(
                self.http.request(method, path, content=msgspec.json.encode(body), headers=headers), kind
            )

    def put(self, path: str, body: Any, kind: type[Answer]) -> Answer:
        headers = {"content-type": "application/json"}
        return self._decoded(
            self.request_with_retry("PUT", path, content=msgspec.json.encode(body), headers=headers), kind
        )

    def delete(self, path: str, kind: type[Answer]) -> Answer:
        with self.connection_errors():
            return self._decoded(self.http.request("DELETE", path), kind)

    def object_size(self, key: str) -> int | None:
        response = self.request_with_retry("HEAD", f"/api/v1/objects/{key}")
        if response.status_code == 404:
            return None
        if response.is_error:
            raise error_of(response.status_code, b"", response.headers)
        return int(response.headers.get("content-length", 0))

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        headers = {"content-length": str(size_bytes), "content-type": "application/octet-stream"}
        with self.connection_errors():
            response = self.http.put(f"/api/v1/objects/{key}", content=content, headers=headers, timeout=300.0)
        if response.is_error:
            raise error_of(response.status_code, response.content)

    def begin_upload(self, manifest: bytes) -> None:
        headers = {"content-type": "application/json"}
        response = self.request_with_retry("POST", "/api/v1/uploads", content=manifest, headers=headers, timeout=300.0)
        if not response.is_error:
            return
        error = error_of(response.status_code, response.content)
        if not isinstance(error, NotFound | Forbidden):
            raise error
        # Controllers of earlier releases have no such route, and say so, or that it is not for this key. They take
        # parts that were not announced; a key without the right is refused with the first one.

    def read_object(self, key: str, limit_bytes: int) -> bytes | None:
        """Reads a small object; None if it does not exist."""
        response = self.request_with_retry("GET", f"/api/v1/objects/{key}", headers={"range": f"bytes=0-{limit_bytes}"})
        if response.status_code in (404, 416):  # 416: an empty one has no range
            return None if response.status_code == 404 else b""
        if response.is_error:
            raise error_of(response.status_code, response.content)
        if len(response.content) > limit_bytes:
            raise TooLarge(f"{key} has more than {limit_bytes:,} bytes")
        return response.content

    def read_range(self, key: str, offset: int, size_bytes: int) -> Iterator[bytes]:
        """Reads a range of an object, in blocks of any size; resumes where a connection breaks."""
        end, broke_at_s = offset + size_bytes, None
        while offset < end:
            try:
                for block in self._streamed(key, offset, end):
                    offset += len(block)
                    broke_at_s = None
                    yield block
            except ConnectionCut:
                broke_at_s = broke_at_s or time.monotonic()
                if time.monotonic() - broke_at_s > RETRY_S:
                    raise
                time.sleep(PAUSE_S)

    def _streamed(self, key: str, offset: int, end: int) -> Iterator[bytes]:
        headers = {"range": f"bytes={offset}-{end - 1}"}
        with self.connection_errors(), self.http.stream("GET", f"/api/v1/objects/{key}", headers=headers) as response:
            if response.is_error:
                raise error_of(response.status_code, response.read())
            expected = f"bytes {offset}-{end - 1}/"
            if response.status_code != 206 or not response.headers.get("content-range", "").startswith(expected):
                raise StoreFailed(
                    f"{key}: {end - offset:,} bytes from {offset:,} were asked for, the server answered "
                    f"{response.status_code} {response.headers.get('content-range', 'without a range')}"
                )
            yield from response.iter_raw()

    def log_lines(self, name: str, *, tail: int, follow: bool) -> Iterator[LogLine]:
        query = {"tail": tail, "follow": int(follow)}
        path = f"/api/v1/functions/{quote(name, safe='')}/logs"
        timeout, lines = self._httpx.Timeout(30.0, read=None if follow else 30.0), RecordDecoder(LogLine)
        with self.connection_errors(), self.http.stream("GET", path, params=query, timeout=timeout) as response:
            if response.is_error:
                raise error_of(response.status_code, response.read())
            for line in response.iter_lines():
                if line:
                    yield self._record(line, lines)

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Turns connection errors into Unreachable, and a request that HTTP does not allow into wrong usage."""
        try:
            yield
        except (self._httpx.LocalProtocolError, self._httpx.InvalidURL, UnicodeEncodeError) as error:
            raise click.UsageError(f"the request cannot be sent: {error}") from error
        except self._httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise Unreachable(
                    f"the certificate of {self.url} is not trusted: {str(error).rpartition('failed: ')[2]}",
                    hint="SSL_CERT_FILE names a file of certificates to trust, for one of your own",
                ) from error
            raise (ConnectionCut if isinstance(error, self._cut) else Unreachable)(
                f"{self.url} does not answer: {str(error) or type(error).__name__}",
                hint="is it running? `fs up` starts a server on this machine, `fs doctor` checks this machine",
            ) from error

    def request_with_retry(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Sends a request that may be repeated. Retries after a broken connection, not after a refused one."""
        ends = time.monotonic() + RETRY_S
        with self.connection_errors():
            while True:
                try:
                    return self.http.request(method, path, **request)
                except self._cut:
                    if time.monotonic() > ends:
                        raise
                    time.sleep(PAUSE_S)

    def _decoded(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        if response.is_error:
            raise error_of(response.status_code, response.content)
        return self._record(response.content, RecordDecoder(kind))

    def _require_server(self, response: httpx.Response) -> None:
        """Errors: Unreachable, if what answers is not the platform and names another server."""
        if elsewhere := redirect_of(response.status_code, response.headers):
            raise Unreachable(f"{self.url} sends its callers to {elsewhere}", hint="use that URL, with FS_URL or --url")

    def _record(self, data: bytes | str, decoder: RecordDecoder[Answer]) -> Answer:
        try:
            return decoder.decode(data)  # a server of a later release may say more
        except UnreadableRecord as error:
            raise FleetError(
                f"{self.url} sent an answer that this `fs` cannot read: {error}",
                hint="is it a fleetstart server? One of a later release may need a newer fs",
            ) from error


def error_of(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> FleetError:
    """Decodes the error of a response: from its body, or from its headers if it answers a HEAD request."""
    if headers is not None and not body and (told := error_info_of(headers)) is not None:
        return error_from(told)
    try:
        return error_from(msgspec.json.decode(body, type=ErrorBody).error)
    except UNDECODABLE:
        text = body[:300].decode(errors="replace").strip()
        said = text or f"{_phrase(status)}, without a word on why; the server's log has it"
        info = ErrorInfo(code="not_found" if status == 404 else "internal", message=f"HTTP {status}: {said}")
        return error_from(info)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "an error"


@contextmanager
def suggest_function(server: ApiClient, name: str) -> Iterator[None]:
    """Adds the nearest existing function to the hint of a NotFound raised in the block."""
    try:
        yield
    except NotFound as error:
        if not error.hint or "did you mean" not in error.hint:
            error.hint = nearest_function(server, name) or error.hint
        raise


def nearest_function(server: ApiClient, name: str) -> str:
    from difflib import get_close_matches

    try:
        names = [str(info.name) for info in server.get("/api/v1/functions", list[FunctionInfo])]
    except FleetError:
        return ""
    if name in names:
        return ""  # it is there: a version or an alias of it is not
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "no function is deployed yet: fs deploy handler.py"
    return f"deployed are {first_of(sorted(names))}" + (": fs ls" if len(names) > NAMED_MAX else "")


def require_function(server: ApiClient, name: str) -> None:
    """Checks that a function exists. Errors: NotFound with the nearest existing one in its hint."""
    with suggest_function(server, name):
        server.get(function_path(name), FunctionInfo)
