"""Caller and audited action of a request, which the middleware leaves in the ASGI scope for handlers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from fleetstart.runtime.contract.ids import FunctionName

from ..http.scope import API_CALLER, AUDITED_ACTION
from ..state.access_records import digest
from .authorize import Caller, local_caller
from .route_rules import Kind


@dataclass(slots=True)
class AuditedAction:
    """The change that a request makes. A handler completes it if the path does not name the object."""

    verb: str
    kind: Kind
    name: str
    before: str = ""
    after: str = ""
    """Digests of an object that the view does not have."""


def caller_of(request: Request) -> Caller:
    """The authenticated caller; a local one where no middleware is, as in a test of one API."""
    found = request.scope.get(API_CALLER)
    return found if isinstance(found, Caller) else local_caller()


def query_function(request: Request) -> FunctionName | None:
    """The full name of the function that `?function=` names; None if it is absent."""
    name = request.query_params.get("function")
    return caller_of(request).full_name(name) if name else None


def set_audit_object(request: Request, name: str) -> None:
    """Names the object for the audit log if the path does not."""
    action = request.scope.get(AUDITED_ACTION)
    if isinstance(action, AuditedAction):
        action.name = name


def set_audit_change(request: Request, before: msgspec.Struct | None, after: msgspec.Struct | None) -> None:
    """Gives the audit log an object as it was and as it is, if the view does not have it."""
    action = request.scope.get(AUDITED_ACTION)
    if isinstance(action, AuditedAction):
        action.before, action.after = digest(before), digest(after)
