"""The tables of error codes: statuses and whether to try again from the classes of the code, causes and advice here."""

from __future__ import annotations

from collections.abc import Iterator

import fleetstart.controller.async_invocations.idempotency.store
import fleetstart.controller.async_invocations.middleware
import fleetstart.controller.async_invocations.store.event_log
import fleetstart.controller.async_invocations.submit
import fleetstart.controller.async_invocations.webhooks.signing
import fleetstart.controller.auth.secret_encryption
import fleetstart.controller.backup.file
import fleetstart.controller.gateway.cors
import fleetstart.controller.gateway.websockets
import fleetstart.controller.http.connection_limits
import fleetstart.runtime.openai_api.invalid_parameter  # noqa: F401  each import registers the codes of a part
from fleetstart.runtime.contract import errors
from fleetstart.runtime.contract.errors import FleetError

HELP = {
    "invalid_input": ("the input does not fit the signature", "`field`, `expected` and `got` say where"),
    "context_length_exceeded": (
        "a prompt and its answer need more tokens than the model's context has",
        "shorten the prompt, lower `max_tokens`, or deploy with larger `max_context` and `kv_memory`",
    ),
    "invalid_spec": ("a setting of a deploy is not allowed", "correct the setting that the message names"),
    "no_handler": (
        "the file declares no function",
        "put `@function` above the handler, or write `web = function(app)`",
    ),
    "syntax_error": ("the handler's file is not valid Python", "the message has line and column"),
    "weights_missing": ("there are no weights at the given place", "correct the path: it is relative to the handler"),
    "pickle_refused": ("the weights are a pickle", "convert them with the line that the message prints"),
    "checkpoint_invalid": ("the weights are truncated, overlapping or unreadable", "download or save them again"),
    "build_failed": ("the packages of a function could not be installed", "the message has uv's explanation"),
    "layer_invalid": ("a layer of packages is damaged or not complete", "deploy again: it sends what is missing"),
    "refused": ("another request that the caller can correct", "the message says what"),
    "unauthorized": ("no key, or none that is valid", "send `Authorization: Bearer KEY`; `fs key ls` lists keys"),
    "budget_spent": ("the function's budget is spent", "wait for its renewal, or `fs budget set`"),
    "forbidden": ("the key is valid, but does not permit this", "use a key with the right; `fs key ls` shows rights"),
    "call_not_declared": (
        "a function calls one that its setting `calls` does not name",
        "add it: `@function(calls=[...])`",
    ),
    "call_loop": ("functions call each other in a circle, or more than 8 deep", "the message has the path"),
    "call_ended": ("a function called another when its own call had ended", "call before the handler returns"),
    "quota_exceeded": ("a quota of the project", "`fs project ls`; raise it, or remove what is not used"),
    "not_found": ("no such function, version, alias, invocation or route", "`fs ls`, `fs versions NAME`"),
    "conflict": (
        "another version of the volume came first, or the store has an object of this name with other bytes",
        "read the newest version, and make the change again; `fs weights verify ID --repair`",
    ),
    "too_large": ("the body is larger than allowed", "send less; raise `max_body` or `FS_MAX_BODY`"),
    "queue_full": ("the function has `scale.max` workers and all are busy", "raise `scale.max` or `concurrency`"),
    "rate_limited": ("a limit of the function or a quota of its project", "`fs scale NAME`, `fs project ls`"),
    "handler_error": ("your code raised an exception", "`fs logs NAME --request ID` has the traceback"),
    "invalid_output": (
        "the answer does not fit the signature, or is none that HTTP allows",
        "correct the annotation or the answer",
    ),
    "start_failed": ("the module or `load` raised, or the worker never became ready", "`fs logs NAME`; deploy a fix"),
    "device_out_of_memory": (
        "the worker's share of its devices was too small",
        "the next worker gets more; ask for more with `gpu` to spare it the failed start",
    ),
    "out_of_memory": ("the worker passed its memory limit", "raise `memory`; weights are not counted"),
    "internal": ("a fault of the platform", "report it, with the lines of `FS_HOME/logs`"),
    "worker_lost": ("the worker died during the call", "`fs logs NAME`; `retries=` where a second run is safe"),
    "store_error": ("the object store did not answer correctly", "`fs status`; check the store and its credentials"),
    "checksum_mismatch": ("fetched bytes are not those that were stored", "`fs weights verify`, then push them again"),
    "unavailable": ("no node, no room, or the system is stopping", "`fs status`, `fs nodes`"),
    "overloaded": ("the call's predicted wait is longer than it may wait", "`wait` in the body has the figures"),
    "queue_timeout": (
        "no worker was free in the time that the call may wait",
        "raise `scale.max` or `queue_timeout_s`",
    ),
    "deadline_exceeded": ("no answer within `timeout_s`", "raise `timeout_s`, or make an async call"),
}
"""Cause and advice by code, in the order of the table."""
HELP_OF_PARTS = {
    "webhook_refused": ("the webhook's address is not allowed", "use a public one, or set `FS_WEBHOOK_ALLOW`"),
    "origin_refused": ("the page's origin is not in the function's `cors`", "add it: `cors=[...]` or `--cors`"),
    "request_timeout": ("the request's headers did not arrive within 15 s", "check the client or the network"),
    "headers_too_large": ("more than 64 KiB of headers, or more than 256", "send less in headers"),
    "model_not_found": ("`model` in a request names another model", "use the function's name; `/v1/models` lists it"),
    "idempotency_mismatch": ("the key belongs to another call", "use a new key for each call"),
    "idempotency_in_progress": ("the first call with the key still runs", "send it again later"),
    "too_many_followers": ("too many log or event streams are open", "close some, or read without `follow`"),
    "idempotency_lost": (
        "the gateway stood still for 10 s, and another call took the key",
        "send it again: it gets that call's answer",
    ),
    "idempotency_not_kept": ("the answer of the first call was too large to store", "call with a new key"),
    "not_answered": ("the async call was cancelled, or did not run in time", "`fs invocations redrive ID`"),
    "events_gone": ("the events after `Last-Event-ID` are no longer kept", "read the result instead"),
    "socket_refused": ("a WebSocket was not accepted by its app", "the app's log says why: `fs logs NAME`"),
    "backup_invalid": ("the file is no backup, damaged, or of a later release", "take another copy or that release"),
    "records_unreadable": ("this release cannot read records of a backup", "restore with the release that wrote them"),
    "vault_closed": ("the master key of the secrets is missing or another one", "restore `master.key`"),
}
HEAD = ["| status | code | cause | what to do | try again? |", "| ---: | --- | --- | --- | --- |"]
STATUS_OF_APP = {"socket_refused": "4xx, 5xx"}
"""Codes whose status is the one that an app chose."""


def markdown_table() -> str:
    return _table(HELP)


def parts_table() -> str:
    return _table(HELP_OF_PARTS)


def _table(texts: dict[str, tuple[str, str]]) -> str:
    known = {error.code: error for error in reversed(list(of_the_code()))}  # a base class wins over one that shares it
    order = sorted(texts, key=lambda code: known[code].status)
    return "\n".join([*HEAD, *(_row(known[code], *texts[code]) for code in order)])


def _row(error: type[FleetError], cause: str, advice: str) -> str:
    status = STATUS_OF_APP.get(error.code, str(error.status))
    return f"| {status} | `{error.code}` | {cause} | {advice} | {'yes' if error.retryable else 'no'} |"


def of_the_code(root: type[FleetError] = FleetError) -> Iterator[type[FleetError]]:
    """All classes of errors that are imported."""
    yield root
    for child in root.__subclasses__():
        yield from of_the_code(child)


def of_the_contract() -> list[type[FleetError]]:
    return [error for error in of_the_code() if error.__module__ == errors.__name__]
