"""Invocations, those that are kept, and what calls functions by the clock."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace

from ...schemas.invocations import InvocationInfo, ReplayTerms, ScheduleInfo, WebhookSecret
from ...schemas.planning import InvocationPlan
from .operation import in_path, in_query, listed, operation, optional, ref

STRUCTS: tuple[type[msgspec.Struct], ...] = (
    InvocationInfo,
    InvocationPlan,
    InvocationRow,
    InvocationTrace,
    ReplayTerms,
    ScheduleInfo,
    WebhookSecret,
)
ONE = "/api/v1/invocations/{id}"
TEXT = {"type": "string"}


def paths() -> dict[str, Any]:
    one, function, limit = in_path("id"), in_query("function"), in_query("limit", "integer")
    info = ref(InvocationInfo)
    return {
        "/api/v1/invocations": {"get": operation("Newest first", listed(InvocationRow), function, limit)},
        ONE: {
            "get": operation("One invocation and its timeline", {"anyOf": [ref(InvocationTrace), info]}, one),
            "delete": operation("Cancel it, also while it runs", info, one),
        },
        f"{ONE}/plan": {
            "get": operation("Why its worker was started as it was, and what came of it", ref(InvocationPlan), one)
        },
        "/api/v1/async": {
            "get": operation(
                "Invocations that are kept, newest first",
                listed(InvocationInfo),
                function,
                in_query("status"),
                in_query("dead", "integer"),
                limit,
            )
        },
        f"{ONE}/cancel": {"post": operation("Cancel it, also while it runs", info, one)},
        f"{ONE}/result": {"get": operation("What was answered, as it was", TEXT, one, media="*/*")},
        f"{ONE}/events": {"get": operation("Its events, from Last-Event-ID on", TEXT, one, media="text/event-stream")},
        f"{ONE}/redrive": {"post": operation("Run one that did not succeed once more", info, one)},
        f"{ONE}/replay": {
            "post": operation("Run its request again as a new one", info, one, status="202", body=optional(ReplayTerms))
        },
        f"{ONE}/redeliver": {"post": operation("Send its webhook again", info, one)},
        "/api/v1/webhooks/secret": {
            "get": operation("What a project's webhooks are signed with", ref(WebhookSecret), in_query("project")),
            "post": operation("Another secret from now on", ref(WebhookSecret), in_query("project")),
        },
        "/api/v1/schedules": {"get": operation("Functions that are called by the clock", listed(ScheduleInfo))},
    }
