"""`fs invoke`: calls a function. Prints the response to stdout as it arrives, and start, time and cost to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import DeadlineExceeded, ErrorBody, FleetError, WorkerLost, error_from
from fleetstart.runtime.contract.ids import new_invocation_id
from fleetstart.runtime.contract.sse import BILL_EVENT, ServerSentEvent, parse_events
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER, REQUEST_HEADER

from .. import output
from ..api_client import PAUSE_S, ApiClient, error_of, find_server, suggest_function
from ..chunk_text import chunk_text
from ..completions import function_names
from ..invocation import async_invoke
from ..invocation.invoke_body import body_content
from ..invocation.model_errors import model_error
from ..root import verb

if TYPE_CHECKING:
    import httpx

RECONNECT_S = 10.0
"""How long a call is retried before its answer begins; a restarted controller is back within 5 s."""
LONGEST_S = 86_400.0
"""Longest --timeout; a longer one counts as this."""


@click.command
@click.argument("name", shell_complete=function_names)
@click.argument("body", required=False, metavar="[JSON|@FILE|-]")
@click.option(
    "-F", "--form", "fields", multiple=True, metavar="NAME=VALUE|NAME=@FILE",
    help="Field of a form, which is sent as multipart/form-data; may be repeated, also with the same name.",
)  # fmt: skip
@click.option(
    "--path", default="", metavar="/PATH", help="Path below the function's URL, such as /v1/chat/completions."
)
@click.option("-X", "--method", help="HTTP method; default: POST with a body, a form or without a path, GET otherwise.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME: VALUE", help="HTTP header; may be repeated.")
@click.option(
    "--stream", is_flag=True, help='Show a stream\'s text as it arrives; below --path, ask for it ("stream": true).'
)
@click.option("--async", "in_background", is_flag=True, help="Do not wait: print the invocation's id.")
@click.option("--wait", "and_wait", is_flag=True, help="With --async: wait until it ends, and print its answer.")
@click.option("--webhook", metavar="URL", help="With --async: URL that is called when it has ended.")
@click.option(
    "--timeout", "timeout_s", default=300.0, show_default=True, metavar="SECONDS", type=float,
    callback=lambda ctx, option, seconds: _timeout(seconds),
)  # fmt: skip
@verb()
@click.pass_obj
def command(
    home: Path,
    *,
    name: str,
    body: str | None,
    fields: Sequence[str],
    path: str,
    method: str | None,
    headers: Sequence[str],
    stream: bool,
    in_background: bool,
    and_wait: bool,
    webhook: str | None,
    timeout_s: float,
    url: str | None,
    as_json: bool,
) -> int:
    """Call a function. The answer goes to stdout as it arrives, start and bill to stderr.

    \b
    fs invoke hello '{"name": "Ada"}'
    fs invoke pack -F files=@a.jpg -F files=@b.jpg -F title=Summer
    fs invoke chat @request.json --path /v1/chat/completions --stream
    fs invoke report '{"month": "2026-10"}' --async     # prints its id: fs invocations get ID
    """
    if (and_wait or webhook) and not in_background:
        raise click.UsageError("--wait and --webhook are for async calls: add --async")
    content, content_type = body_content(body, fields, ask_for_stream=stream and bool(path))
    sent = {**content_type, **_headers(headers)}
    method = _method(method or ("POST" if content is not None or not path else "GET"))
    target = _target(name, path)
    if in_background:
        sent = {
            "idempotency-key": new_invocation_id(),
            **sent,
            "prefer": "respond-async",
            **({"fs-webhook": webhook} if webhook else {}),
        }
        with ApiClient(find_server(url, home)) as server, suggest_function(server, name.partition("@")[0]):
            return async_invoke.invoke_async(
                server, method, target, content, as_typed(sent), wait_s=timeout_s if and_wait else None, as_json=as_json
            )
    with (
        ApiClient(find_server(url, home)) as server,
        suggest_function(server, name.partition("@")[0]),
        ExitStack() as stack,
    ):
        began_s = time.monotonic()
        with server.connection_errors():
            request = server.http.build_request(
                method, target, content=content, headers=as_typed(sent), timeout=timeout_s
            )
        response = _sent(server, request, ends_s=began_s + timeout_s)
        stack.callback(response.close)
        with _whole():
            if response.headers.get(ERROR_HEADER):
                raise error_of(response.status_code, response.read())
            bill, failed = _shown(response, text_only=stream, as_json=as_json)
    if not as_json:
        output.message(_summary(response, bill, time.monotonic() - began_s))
    return output.FAILED if failed else output.OK


def _timeout(seconds: float) -> float:
    if not seconds > 0:
        raise click.BadParameter(f"{seconds:g} is not a time above 0", param_hint="--timeout")
    return min(seconds, LONGEST_S)


def _target(name: str, path: str) -> str:
    return f"/fn/{quote(name, safe='@')}" + (path if path.startswith("/") or not path else f"/{path}")


def _method(name: str) -> str:
    if not name.isascii():
        raise click.UsageError(f"the request cannot be sent: the method {name!r} has characters beyond ASCII")
    return name.upper()


def _sent(server: ApiClient, request: httpx.Request, *, ends_s: float) -> httpx.Response:
    """Sends the request until a response begins. What a controller began that died before it answered is not billed."""
    import httpx

    lost_s = min(ends_s, time.monotonic() + RECONNECT_S)
    while True:
        try:
            return server.http.send(request, stream=True)
        except (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if time.monotonic() > lost_s:
                with server.connection_errors():
                    raise
            time.sleep(PAUSE_S)
        except httpx.ReadTimeout as error:
            raise _too_late() from error
        except (httpx.LocalProtocolError, UnicodeEncodeError):
            with server.connection_errors():
                raise


@contextmanager
def _whole() -> Iterator[None]:
    """Turns a break in an answer into an error: a call whose answer has begun is not retried."""
    import httpx

    try:
        yield
    except httpx.ReadTimeout as error:
        raise _too_late() from error
    except httpx.TransportError as error:
        raise WorkerLost("the answer broke off", hint="call again; `fs logs` may say why") from error


def _too_late() -> DeadlineExceeded:
    hint = "give it longer with --timeout; `fs logs` shows what it does"
    return DeadlineExceeded("no answer within the time given", hint=hint)


def _shown(response: httpx.Response, *, text_only: bool, as_json: bool) -> tuple[Mapping[str, Any], bool]:
    """Writes the answer; returns the bill in the closing event of a stream, and whether the call failed."""
    bill: dict[str, Any] = {}
    failed = response.is_error
    if as_json:
        output.json_data(_as_data(response))
    elif response.headers.get("content-type", "").startswith("text/event-stream"):
        line_ended = False
        for event in parse_events(response.iter_bytes()):
            if event.name == "error":
                raise _stream_error(event)
            if event.name == BILL_EVENT:
                bill = msgspec.json.decode(event.data, type=dict[str, Any])
                continue
            if text_only and (failure := model_error(event.data)) is not None:
                failed = True
                if not line_ended:
                    _write(b"\n")
                line_ended = True
                output.show_error(failure, as_json=False)
                continue
            wrote = _event_text(event, text_only=text_only)
            line_ended = line_ended and not wrote
            _write(wrote.encode())
        if text_only and not line_ended:
            _write(b"\n")
    elif response.is_error and (failure := model_error(response.read())) is not None:
        output.show_error(failure, as_json=False)
    else:
        last = b"\n"
        for block in response.iter_bytes():
            _write(block)
            last = block or last
        if sys.stdout.isatty() and not last.endswith(b"\n"):
            _write(b"\n")
    return bill, failed


def _event_text(event: ServerSentEvent, *, text_only: bool) -> str:
    if not text_only:
        return event.data + "\n"
    if event.data == "[DONE]":
        return ""
    text = chunk_text(event.data)
    return event.data + "\n" if text is None else text


def _stream_error(event: ServerSentEvent) -> FleetError:
    try:
        return error_from(msgspec.json.decode(event.data, type=ErrorBody).error)
    except UNDECODABLE:
        return FleetError(f"the stream ended with an error: {event.data}")


def _as_data(response: httpx.Response) -> dict[str, Any]:
    response.read()
    try:
        body = msgspec.json.decode(response.content)
    except UNDECODABLE:
        body = response.text
    return {"status": response.status_code, "headers": dict(response.headers), "body": body}


def _summary(response: httpx.Response, bill: Mapping[str, Any], took_s: float) -> str:
    """ "cold start, chat@1, 812 ms, billed 140 ms, $0.000004583, inv-…" from headers, or a stream's last event."""
    headers = response.headers
    billed = bill.get("billed_ms", headers.get("fs-billed-ms"))
    cost = bill.get("cost", headers.get("fs-cost"))
    facts = [
        f"HTTP {response.status_code}" if response.is_error else "",
        f"{headers['fs-start']} start" if "fs-start" in headers else "",
        f"version {headers['fs-version']}" if "fs-version" in headers else "",
        f"{took_s * 1000:.0f} ms",
        f"billed {billed} ms" if billed is not None else "",
        f"${cost}" if cost is not None else "",
        headers.get(REQUEST_HEADER, ""),
    ]
    return ", ".join(fact for fact in facts if fact)


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    split: Iterator[tuple[str, str, str]] = (pair.partition(":") for pair in pairs)
    headers = {}
    for key, colon, value in split:
        if not colon or not key.strip():
            raise click.UsageError(f"-H {key!r} is not NAME: VALUE")
        if key.strip().lower() in ("content-length", "transfer-encoding"):
            raise click.UsageError(f"-H {key!r} follows from the body: leave it out")
        headers[key.strip().lower()] = value.strip()
    return headers


def as_typed(headers: Mapping[str, str]) -> httpx.Headers:
    """The headers as they are sent: what is beyond ASCII in UTF-8. Errors: UsageError."""
    import httpx

    try:
        return httpx.Headers(headers, encoding="utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"the request cannot be sent: a header has bytes that are no UTF-8: {error}") from error


def _write(content: bytes) -> None:
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
