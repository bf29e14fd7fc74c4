"""What handlers behind the door may ask it: who calls; and tell it: what about."""

from __future__ import annotations

from starlette.requests import Request

from ..http.scope import API_CALLER, AUDITED_ACTION
from .authorize import Caller, local_caller
from .middleware import AuditedAction


def caller_of(request: Request) -> Caller:
    """Whoever the door let in; local where there is no door, as in a test of one API."""
    found = request.scope.get(API_CALLER)
    return found if isinstance(found, Caller) else local_caller(lambda function: None)


def set_audit_object(request: Request, name: str) -> None:
    """Tells the audit log what a request is about if its path does not."""
    deed = request.scope.get(AUDITED_ACTION)
    if isinstance(deed, AuditedAction):
        deed.name = name
