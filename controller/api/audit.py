"""The management API's parts that deal with access, put together; and the audit log, which has only one route."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.spec import FunctionSpec

from ..async_invocations.webhooks.secrets import WebhookSecrets
from ..auth.audit_log import AuditLog
from ..auth.authorize import Caller
from ..auth.deploy_policy import apply_deploy_policy
from ..auth.secret_encryption import SecretCipher
from ..http.json_api import json_response
from ..state.sync import StateSync
from .keys import KeysApi
from .projects import ProjectsApi
from .secrets import SecretsApi

AUDIT_MAX = 10_000


class AccessApi:
    def __init__(self, state: StateSync, audit: AuditLog, vault: SecretCipher, webhook_secrets: WebhookSecrets) -> None:
        self._state = state
        self._audit = audit
        self.routes = [
            *KeysApi(state).routes,
            *ProjectsApi(state, webhook_secrets).routes,
            *SecretsApi(state, vault, webhook_secrets).routes,
            Route("/api/v1/audit", self.audit),
        ]

    async def audit(self, request: Request) -> Response:
        query = request.query_params
        since_unix_ms, limit = _number(query.get("since_unix_ms"), 0), _number(query.get("limit"), 1000)
        return json_response(await self._audit.read(since_unix_ms, query.get("by", ""), min(limit, AUDIT_MAX)))

    def deployable(self, caller: Caller, spec: FunctionSpec) -> FunctionSpec:
        """The spec as it may be deployed by this caller. Errors: those of `apply_deploy_policy`."""
        return apply_deploy_policy(self._state.view, caller, spec)


def _number(text: str | None, default: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise InvalidInput(f"{text[:40]!r} must be a whole number, 0 or more")
    return int(text)
