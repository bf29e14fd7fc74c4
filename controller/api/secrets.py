"""Handlers of secrets: set, list by name, remove, re-encrypt. Values are never returned."""

from __future__ import annotations

from difflib import get_close_matches

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Forbidden, InvalidInput, NotFound
from fleetstart.runtime.contract.function.setting_checks import SECRET_NAME
from fleetstart.runtime.contract.node.orders import FINAL
from fleetstart.runtime.contract.process.redaction import LEAST_CHARS

from ..async_invocations.webhooks.secrets import WebhookSecrets
from ..auth.authorize import Caller, project_not_found
from ..auth.deploy_policy import SECRETS_MAX_BYTES, functions_using_secret
from ..auth.request_context import caller_of, set_audit_object
from ..auth.secret_encryption import SecretCipher
from ..http.json_api import json_body, json_response, now_unix_ms
from ..identity.nodes import NodeIdentities
from ..schemas.access import Rekeyed, SecretInfo, SecretValue
from ..state.access_records import SecretRecord, secret_field
from ..state.cas_hash import CasHash
from ..state.sync import StateSync

VALUE_MAX_BYTES = 32 * 1024
BODY_MAX_BYTES = 8 * VALUE_MAX_BYTES
"""Maximum size of the request: JSON may write a byte as six."""
SECRETS_MAX = 1000
"""Number of secrets of all projects: each gateway has them in memory, encrypted."""


class SecretsApi:
    def __init__(
        self,
        state: StateSync,
        cipher: SecretCipher,
        webhook_secrets: WebhookSecrets,
        identities: NodeIdentities,
    ) -> None:
        self._identities = identities
        self._view = state.view
        self._webhook_secrets = webhook_secrets
        self._cipher = cipher
        self._hash = CasHash(state, keys.SECRETS, SecretRecord)

    async def secrets(self, request: Request) -> Response:
        caller = caller_of(request)
        records = sorted(self._view.access.secrets.values(), key=lambda record: (record.project, record.name))
        return json_response([self._info(record, caller) for record in records if caller.sees_project(record.project)])

    async def set(self, request: Request) -> Response:
        project, name = self._place(request)
        if not SECRET_NAME.fullmatch(name):
            raise InvalidInput(
                f"secret {name[:80]!r} cannot be an environment variable",
                hint="its name is 1 to 64 of A-Z, a-z, 0-9 and _, no digit first",
            )
        value = _checked(name, (await json_body(request, SecretValue, limit_bytes=BODY_MAX_BYTES)).value)
        if len(self._view.access.secrets) >= SECRETS_MAX and self._view.access.secret(project, name) is None:
            raise InvalidInput(f"there are {SECRETS_MAX} secrets already, and cannot be more")
        self._check_total(project, name, len(value.encode()))
        now, by = now_unix_ms(), caller_of(request).name

        def changed(known: SecretRecord | None) -> SecretRecord:
            box, master = self._cipher.encrypt(project, name, value)
            return SecretRecord(
                name=name,
                project=project,
                box=box,
                master=master,
                size_bytes=len(value.encode()),
                created_unix_ms=known.created_unix_ms if known is not None else now,
                updated_unix_ms=now,
                updated_by=by,
            )

        record = await self._hash.change(secret_field(project, name), changed)
        assert record is not None
        while not self._cipher.knows(record.master):  # a rekey came between, which did not see this one yet
            record = await self._hash.change(secret_field(project, name), changed)
            assert record is not None
        return json_response(self._info(record, caller_of(request)))

    async def remove(self, request: Request) -> Response:
        project, name = self._place(request)
        record = self._view.access.secret(project, name)
        if record is None:
            near = get_close_matches(name[:80], self._view.access.secret_names(project), n=1)
            hint = f"did you mean {near[0]}?" if near else "`fs secret ls` lists what there is"
            raise NotFound(f"project {project[:80]} has no secret {name[:80]}", hint=hint)
        info = self._info(record, caller_of(request))
        if info.used_by and request.query_params.get("force", "0") in ("", "0", "false"):
            raise InvalidInput(
                f"secret {name} is used by {', '.join(info.used_by)}, whose workers would not start without it",
                hint="deploy them without it first, or insist: --force",
            )
        await self._hash.change(record.field, lambda known: None)
        return json_response(info)

    async def rekey(self, request: Request) -> Response:
        """Encrypts all secrets under a new master key, and drops the older keys that nothing in Redis needs."""
        master = self._cipher.add_master_key()
        set_audit_object(request, master)
        count = 0
        for field in await self._hash.stored():
            await self._hash.change(field, self._reencrypt)
            count += 1
        count += await self._webhook_secrets.reencrypt_all()
        await self._identities.reencrypt()
        used = {record.master for record in (await self._hash.stored()).values()}
        used |= await self._webhook_secrets.masters() | await self._identities.masters()
        self._cipher.drop_old_keys(used)
        return json_response(Rekeyed(secrets=count, master=master))

    def _reencrypt(self, record: SecretRecord | None) -> SecretRecord | None:
        if record is None:
            return None
        box, master = self._cipher.encrypt(record.project, record.name, self._cipher.decrypt(record))
        return msgspec.structs.replace(record, box=box, master=master)

    def _place(self, request: Request) -> tuple[str, str]:
        """Project and name. Errors: Forbidden, NotFound."""
        project, name, caller = request.path_params["project"], request.path_params["name"], caller_of(request)
        if caller.key is not None and caller.key.functions:
            raise Forbidden(
                f"key {caller.name} is for functions {', '.join(caller.key.functions)}; a secret is of a whole project",
                hint="use a key that was made without --function",
            )
        if not caller.sees_project(project) or not self._view.access.has_project(project):
            raise project_not_found(project, [one for one in self._view.access.projects if caller.sees_project(one)])
        return project, name

    def _check_total(self, project: str, name: str, size_bytes: int) -> None:
        for function in functions_using_secret(self._view, project, name):
            version = self._view.live(function)
            others = [one for one in version.spec.secrets if one != name] if version is not None else []
            found = [record for one in others if (record := self._view.access.secret(project, one)) is not None]
            total_bytes = size_bytes + sum(record.size_bytes for record in found)
            if total_bytes > SECRETS_MAX_BYTES:
                raise InvalidInput(
                    f"with it, the secrets of {function} have {total_bytes} bytes, {SECRETS_MAX_BYTES} at most"
                )

    def _info(self, record: SecretRecord, caller: Caller) -> SecretInfo:
        """The record without its value, and those of its functions that the caller sees."""
        used_by = [
            name for name in functions_using_secret(self._view, record.project, record.name) if caller.sees(name)
        ]
        statuses = (one for name in used_by for one in self._view.statuses_of(name).values())
        running = [one for one in statuses if one.state not in FINAL]
        return SecretInfo(
            name=record.name,
            project=record.project,
            size_bytes=record.size_bytes,
            master=record.master,
            created_unix_ms=record.created_unix_ms,
            updated_unix_ms=record.updated_unix_ms,
            updated_by=record.updated_by,
            used_by=[str(name) for name in used_by],
            running=len(running),
        )


def _checked(name: str, value: str) -> str:
    """Validates a value. Errors: InvalidInput, without the value."""
    size_bytes = len(value.encode())
    if size_bytes > VALUE_MAX_BYTES:
        raise InvalidInput(f"secret {name} has {size_bytes} bytes, {VALUE_MAX_BYTES} at most")
    if len(value.strip()) < LEAST_CHARS:
        raise InvalidInput(
            f"secret {name} has less than {LEAST_CHARS} characters: it could not be kept out of logs without hiding "
            "half of them",
            hint="what is no secret belongs into env",
        )
    if any(not char.isprintable() and char not in "\n\r\t" for char in value):
        raise InvalidInput(
            f"secret {name} has control characters, which an environment variable cannot have",
            hint="encode it: base64 < FILE | fs secret set NAME --from-file -",
        )
    return value
