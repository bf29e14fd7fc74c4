"""What /openapi.json says of this package's routes: summaries, parameters and structs; `openapi` puts them in shape."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fleetstart.controller.invocations.resources import InvocationInfo, ReplayTerms, ScheduleInfo, WebhookSecret

__all__ = ["ROUTES", "STRUCTS", "Described", "InvocationInfo"]
STRUCTS: tuple[type[msgspec.Struct], ...] = (InvocationInfo, ReplayTerms, ScheduleInfo, WebhookSecret)
_AT = "/api/v1/invocations/{id}"


class Described(NamedTuple):
    path: str
    method: str
    summary: str
    answer: type[msgspec.Struct] | None
    query: tuple[tuple[str, str], ...] = ()
    """Name and JSON type."""
    listed: bool = False
    status: str = "200"
    media: str = "application/json"
    body: type[msgspec.Struct] | None = None


ROUTES = (
    Described(
        "/api/v1/async",
        "get",
        "Invocations that are kept, newest first",
        InvocationInfo,
        query=(("function", "string"), ("status", "string"), ("dead", "integer"), ("limit", "integer")),
        listed=True,
    ),
    Described(_AT, "delete", "Cancel it, also while it runs", InvocationInfo),
    Described(f"{_AT}/cancel", "post", "Cancel it, also while it runs", InvocationInfo),
    Described(f"{_AT}/result", "get", "What was answered, as it was", None, media="*/*"),
    Described(f"{_AT}/events", "get", "Its events, from Last-Event-ID on", None, media="text/event-stream"),
    Described(f"{_AT}/redrive", "post", "Run one that did not succeed once more", InvocationInfo),
    Described(
        f"{_AT}/replay", "post", "Run its request again as a new one", InvocationInfo, status="202", body=ReplayTerms
    ),
    Described(f"{_AT}/redeliver", "post", "Send its webhook again", InvocationInfo),
    Described("/api/v1/webhooks/secret", "get", "The secret that webhooks are signed with", WebhookSecret),
    Described("/api/v1/webhooks/secret", "post", "Another secret from now on", WebhookSecret),
    Described("/api/v1/schedules", "get", "Functions that are called by the clock", ScheduleInfo, listed=True),
)
