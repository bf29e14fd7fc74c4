"""Builds the OpenAPI document of one function from its stored interface. No worker is started for it.

An ASGI app describes itself at a path of its own, to which the document links.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.errors import ErrorBody
from fleetstart.runtime.contract.function.interface import Interface, Schema
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import Version

from ...schemas.examples import example

JSON, EVENTS, BYTES = "application/json", "text/event-stream", "application/octet-stream"
MULTIPART = "multipart/form-data"
UNKNOWN = Interface(takes="unknown", gives="response")

ERRORS = {
    "400": ("invalid_input", "The input is invalid: `field`, `expected` and `got` name the mismatch."),
    "402": ("budget_spent", "The function's budget is spent; Retry-After is the time until it renews."),
    "404": ("not_found", "No such function, version or alias."),
    "413": ("too_large", "The request body exceeds the limit."),
    "429": ("queue_full", "The queue is full, or a rate limit was exceeded; see Retry-After."),
    "500": ("handler_error", "The handler raised, returned a value that its signature excludes, or could not start."),
    "502": (
        "worker_lost",
        "The worker was lost during the call; `retries` of the function says whether it runs again.",
    ),
    "503": ("unavailable", "No capacity for a worker now; see Retry-After."),
    "504": ("deadline_exceeded", "No response within the call's timeout."),
}
HEADERS = {
    "X-Request-Id": "Id of the invocation, for `fs trace` and `fs logs --request`.",
    "Fs-Version": "The version that answered.",
    "Fs-Start": "hot, standby, warm or cold.",
    "Fs-Attempts": "Number of workers that the call was sent to.",
    "Server-Timing": "The phases of the call, in milliseconds.",
    "Fs-Billed-Ms": "Billed milliseconds; a stream has them in its closing event.",
    "Fs-Cost": "Cost in dollars; a stream has it in its closing event.",
}
_STREAM = (
    "Server-sent events: each item of the answer is one event with `id` and JSON in `data`. `event: error` ends a "
    "stream that failed, with an error as `data`; `event: fleetstart` closes it with its cost."
)
_PROGRESS = (
    "With `Accept: text/event-stream`, if the handler reports progress: `event: progress` with `fraction` and "
    "`message`, then the result as one event."
)


def function_document(spec: FunctionSpec, version: Version, url: str) -> dict[str, Any]:
    """Makes the document. `url`: the URL of the function's calls."""
    interface = spec.interface or UNKNOWN
    _, errors = msgspec.json.schema_components([ErrorBody], ref_template="#/components/schemas/{name}")
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": spec.name, "version": str(version), "description": interface.description},
        "servers": [{"url": url}],
        "paths": _paths(interface, spec.name),
        "components": {"schemas": {**errors, **interface.schemas}},
    }
    if interface.takes == "asgi":
        document["externalDocs"] = {
            "description": "An ASGI app serves all paths, and describes itself.",
            "url": f"{url}/openapi.json",
        }
    return document


def _paths(interface: Interface, name: str) -> dict[str, Any]:
    if interface.takes == "asgi":
        return {}
    if interface.takes == "llm":
        return _llm_paths()
    post = _operation("call", f"Call {name}", interface)
    post["requestBody"] = _body(interface)
    operations = {"post": post}
    query = _query(interface)
    if query is not None:
        operations["get"] = _operation("get", f"Call {name} with its input in the query", interface) | {
            "parameters": query
        }
    return {"/": operations}


def _operation(operation: str, summary: str, interface: Interface) -> dict[str, Any]:
    return {"operationId": operation, "summary": summary, "responses": _responses(interface)}


# ── requests ───────────────────────────────────────────────────────────────────────────────────────


def _body(interface: Interface) -> dict[str, Any]:
    if interface.takes == "unknown":
        return {"content": {"*/*": {}}}
    if interface.takes == "bytes":
        one = {"type": "object", "properties": {"file": interface.input}, "required": ["file"]}
        return {"required": True, "content": {BYTES: {"schema": interface.input}, MULTIPART: {"schema": one}}}
    media: dict[str, Any] = {"schema": interface.input, "example": example(interface.input, interface.schemas)}
    content = {JSON: media}
    if interface.files:
        properties = {key: _as_part(value, interface) for key, value in interface.input.get("properties", {}).items()}
        content[MULTIPART] = {"schema": interface.input | {"properties": properties}}
        if any(_is_file(value) for value in interface.input.get("properties", {}).values()):
            del content[JSON]  # there is no way to write a file in JSON
    return {"required": bool(interface.input.get("required")) or interface.takes == "whole", "content": content}


def _as_part(schema: Schema, interface: Interface) -> Schema:
    """Bytes are sent as they are in a form."""
    if schema.get("contentEncoding") == "base64":
        return {"type": "string", "format": "binary"}
    return schema


def _is_file(schema: Schema) -> bool:
    inner = [schema.get("items"), *schema.get("anyOf", [])]
    return schema.get("format") == "binary" or any(isinstance(one, dict) and _is_file(one) for one in inner)


def _query(interface: Interface) -> list[dict[str, Any]] | None:
    """The parameters as a query string's; None if the input cannot be given in one."""
    if interface.takes != "fields":
        return None
    properties: dict[str, Schema] = interface.input.get("properties", {})
    if not all(_is_simple(schema, interface) for schema in properties.values()):
        return None
    required = interface.input.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": schema}
        for name, schema in properties.items()
    ]


def _is_simple(schema: Schema, interface: Interface) -> bool:
    if "$ref" in schema:
        schema = interface.schemas.get(schema["$ref"].rpartition("/")[2], {})
        return "enum" in schema
    if schema.get("type") == "array":
        return _is_simple(schema.get("items", {}), interface)
    return "enum" in schema or (
        schema.get("type") in ("integer", "number", "string", "boolean") and not _is_file(schema)
    )


# ── answers ────────────────────────────────────────────────────────────────────────────────────────


def _responses(interface: Interface) -> dict[str, Any]:
    return {"200": _answer(interface), **{status: _error(status) for status in ERRORS}}


def _answer(interface: Interface) -> dict[str, Any]:
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()}
    if interface.gives == "events":
        item = {"schema": {"type": "string"}, "x-item-schema": interface.output}
        return {"description": _STREAM, "headers": headers, "content": {EVENTS: item}}
    if interface.gives == "bytes":
        return {"description": "The bytes.", "headers": headers, "content": {BYTES: {"schema": interface.output}}}
    if interface.gives == "response":
        return {
            "description": "The answer, with a content type of its own.",
            "headers": headers,
            "content": {"*/*": {}},
        }
    answer: dict[str, Any] = {"schema": interface.output}
    if interface.output:
        answer["example"] = example(interface.output, interface.schemas)
    return {
        "description": "The answer.",
        "headers": headers,
        "content": {JSON: answer, EVENTS: {"schema": {"type": "string", "description": _PROGRESS}}},
    }


def _error(status: str) -> dict[str, Any]:
    code, text = ERRORS[status]
    shown = {"error": {"code": code, "message": text}, "request_id": "inv-1"}
    return {
        "description": text,
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/ErrorBody"}, "example": shown}},
    }


# ── language models ────────────────────────────────────────────────────────────────────────────────


def _llm_paths() -> dict[str, Any]:
    message = {"role": "user", "content": "Hello!"}
    chat = {"messages": [message], "max_tokens": 32, "stream": False}
    return {
        "/v1/models": {"get": _llm_operation("models", "The model's name", None)},
        "/v1/chat/completions": {"post": _llm_operation("chat", "As OpenAI's chat completions", chat)},
        "/v1/completions": {
            "post": _llm_operation("complete", "As OpenAI's completions", {"prompt": "Once", "max_tokens": 32})
        },
        "/v1/responses": {
            "post": _llm_operation("respond", "As OpenAI's responses", {"input": "Hello!", "max_output_tokens": 32})
        },
    }


def _llm_operation(operation: str, summary: str, shown: dict[str, Any] | None) -> dict[str, Any]:
    answer = {
        "description": "As OpenAI's; with `stream` as server-sent events, closed by `[DONE]`.",
        "content": {JSON: {"schema": {"type": "object"}}, EVENTS: {"schema": {"type": "string"}}},
    }
    found: dict[str, Any] = {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": answer, **{status: _error(status) for status in ERRORS}},
    }
    if shown is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": {"type": "object"}, "example": shown}}}
    return found
