"""Async invocations on the command line: submit one, wait for its end with `Prefer: wait`, print it and its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from fleetstart.runtime.contract.errors import DeadlineExceeded, NotFound

from ...schemas.invocations import InvocationInfo
from .. import output
from ..api_client import ApiClient, error_of
from ..units import format_utc
from .model_errors import model_error

ENDED = frozenset(("succeeded", "failed", "cancelled", "expired"))
POLL_S = 20
"""How long one request waits for the end: shorter than the client's own timeout."""


def wait_for_end(server: ApiClient, invocation: str, *, timeout_s: float) -> InvocationInfo:
    """Waits until the invocation ends, and returns it. Errors: DeadlineExceeded, NotFound, Unreachable."""
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0, min(POLL_S, round(ends_s - time.monotonic())))
        with server.connection_errors():
            response = server.http.get(
                f"/api/v1/invocations/{quote(invocation, safe='')}", headers={"prefer": f"wait={left_s}"}
            )
        if response.is_error:
            raise error_of(response.status_code, response.content)
        info = msgspec.json.decode(response.content, type=InvocationInfo)
        if info.status in ENDED:
            return info
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(
                f"invocation {invocation} is {info.status} after {timeout_s:g} s",
                hint=f"fs invocations get {invocation}",
            )


def invoke_async(
    server: ApiClient,
    method: str,
    target: str,
    content: bytes | None,
    headers: Mapping[str, str],
    *,
    wait_s: float | None,
    as_json: bool,
) -> int:
    """Submits an async call and returns the exit code. Its idempotency key makes the server accept it once."""
    response = server.request_with_retry(method, target, content=content, headers=headers)
    if response.status_code != 202:
        raise error_of(response.status_code, response.content)
    info = msgspec.json.decode(response.content, type=InvocationInfo)
    if wait_s is None:
        if as_json:
            output.json_data(info)
        else:
            output.data(info.id)
        return output.OK
    if not as_json:
        output.message(info.id)
    info = wait_for_end(server, info.id, timeout_s=wait_s)
    if as_json:
        print_invocation(info, as_json=True)
        return output.OK if info.status == "succeeded" else output.FAILED
    code = print_result(server, info.id, unchanged=False)
    bill = f", billed {info.billed_ms} ms, ${info.cost}" if info.cost else ""
    output.message(f"{info.status}, version {info.version}{bill}")
    return code


def invocation_path(invocation: str) -> str:
    return f"/api/v1/invocations/{quote(invocation, safe='')}"


def get_invocation(server: ApiClient, invocation: str) -> InvocationInfo:
    """Fetches a stored invocation. Errors: NotFound, also for a synchronous call, of which only the trace is stored."""
    found = server.get(invocation_path(invocation), dict[str, msgspec.Raw])
    if "status" not in found:
        raise NotFound(
            f"{invocation} was a synchronous call, and its request is not stored",
            hint="`fs trace` shows its timeline; requests are stored of functions with keep_requests=True",
        )
    return msgspec.json.decode(msgspec.json.encode(found), type=InvocationInfo)


def print_result(server: ApiClient, invocation: str, *, unchanged: bool) -> int:
    """Writes the stored answer to stdout; if there is none yet, a line to stderr.

    A model's error goes to stderr in words, unless the answer is to be `unchanged`.
    """
    with server.connection_errors():
        response = server.http.get(f"{invocation_path(invocation)}/result")
    if response.headers.get("fs-error") or response.status_code == 404:
        raise error_of(response.status_code, response.content)
    if response.status_code == 202 and response.headers.get("location"):
        output.message(f"{invocation} has not ended yet")
        return output.FAILED
    if response.is_error and not unchanged and (failure := model_error(response.content)) is not None:
        output.show_error(failure, as_json=False)
        return output.FAILED
    sys.stdout.buffer.write(response.content)
    sys.stdout.buffer.flush()
    return output.FAILED if response.is_error else output.OK


def print_invocation(info: InvocationInfo, *, as_json: bool) -> None:
    if as_json:
        output.json_data(info)
        return
    facts = [f"{info.id}  {info.method} {info.target}  {describe_state(info)}"]
    facts += [f"  {format_utc(moment.unix_ms)}  {moment.what}" for moment in info.history]
    if info.progress is not None:
        facts.append(
            f"  {format_utc(info.progress.unix_ms)}  {info.progress.fraction:.0%}: {info.progress.message}".rstrip(": ")
        )
    if info.error is not None:
        facts.append(f"  error: {info.error.message}")
    ran = f"version {info.version}" + (f", {info.start} start" if info.start else "") + f", billed {info.billed_ms} ms"
    ran += f", ${info.cost}" if info.cost else ""
    if info.http_status:
        size = output.format_size(info.result_bytes)
        facts.append(f"  HTTP {info.http_status}, {size} {info.content_type}, {ran}")
    elif info.cost:  # cancelled, say: it ran, and has no answer
        facts.append(f"  {ran}")
    if info.delivery is not None:
        said = info.delivery.error or (f"HTTP {info.delivery.http_status}" if info.delivery.http_status else "")
        tries = "1 try" if info.delivery.tries == 1 else f"{info.delivery.tries} tries"
        facts.append(f"  webhook {info.delivery.state} after {tries}{f': {said}' if said else ''}")
    output.data("\n".join(facts))
    if not isinstance(info.result, msgspec.UnsetType):
        output.json_line(info.result)


def describe_state(info: InvocationInfo) -> str:
    if info.dead_letter:
        return "failed, a dead letter"
    if info.status == "running" and info.progress is not None and not info.cancelling:
        return f"running, {info.progress.fraction:.0%}"
    return f"{info.status}, to be cancelled" if info.cancelling else info.status
