"""Lets the owner of a home in again whose key is lost: another one is put into the system's Redis itself."""

from __future__ import annotations

import itertools
import time

import msgspec
import redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import NotFound, Unauthorized

from ...auth.api_key import new_key_text, parse_key
from ...auth.owner_key import NAME, owner_key_record, write_key_file
from ...schemas.access import AuditEvent, KeyInfo
from ...state.access_records import LOCAL, digest
from ..api_client import Address, ApiClient
from ..home import HomeLayout, SupervisorRecord, read_record
from ..output import Unreachable

HEARD_S = 5.0
"""For the controller to hear of it, or else to read Redis again, once a second."""
POLL_S = 0.05


def recover_key(layout: HomeLayout, url: str) -> str:
    """The name of the new key, which is kept and good when this returns. Errors: Unreachable, NotFound."""
    record = read_record(layout.supervisor, SupervisorRecord)
    if record is None:
        raise Unreachable(f"no server runs in {layout.home}", hint="start it with `fs up`, then recover its key")
    text = new_key_text().text
    try:
        with redis.Redis.from_url(record.redis_url, socket_timeout=HEARD_S) as client:
            name = _put(client, text)
    except redis.RedisError as error:
        raise Unreachable(f"the system's Redis does not answer: {error}", hint="see `fs status`") from error
    write_key_file(layout.key, text)
    layout.open.unlink(missing_ok=True)
    _await(Address(url, text))
    return name


def _put(client: redis.Redis, text: str) -> str:
    """Under a name that no key has had. Errors: NotFound."""
    if not client.exists(keys.KEYS):
        raise NotFound("there are no keys, so none is lost", hint="make the first: fs key create admin --scope admin")
    now_unix_ms = time.time_ns() // 1_000_000
    for number in itertools.count(1):
        name = NAME if number == 1 else f"{NAME}-{number}"
        made = owner_key_record(parse_key(text), name, now_unix_ms)
        if client.hsetnx(keys.KEYS, name, msgspec.json.encode(made).decode()):
            event = AuditEvent(
                unix_ms=now_unix_ms, by=LOCAL, address=LOCAL, verb="key.recover", object=f"key {name}", status=201,
                after=digest(made),
            )  # fmt: skip
            client.xadd(keys.AUDIT, {"event": msgspec.json.encode(event)})
            client.publish(keys.EVENTS_FUNCTIONS, name)
            return name
    raise AssertionError("there is always a next number")


def _await(address: Address) -> None:
    ends = time.monotonic() + HEARD_S
    with ApiClient(address) as server:
        while True:
            try:
                server.get("/api/v1/keys", list[KeyInfo])
                return
            except Unauthorized:
                if time.monotonic() > ends:
                    raise
                time.sleep(POLL_S)
