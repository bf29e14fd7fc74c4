"""Recovery of a lost owner key: writes another one directly into the system's Redis."""

from __future__ import annotations

import itertools
import time

import msgspec
import redis

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import NotFound, Unauthorized

from ...auth.api_key import new_key_text, parse_key
from ...auth.owner_key_file import NAME, owner_key_record, write_key_file
from ...schemas.access import AuditEvent, KeyInfo
from ...state.access_records import LOCAL, digest
from ..api_client import Address, ApiClient
from ..home import HomeLayout, read_supervisor
from ..output import Unreachable

KNOWN_S = 5.0
"""How long the controller may take to learn of the key: it is notified, and reads Redis once a second."""
POLL_S = 0.05


def recover_key(layout: HomeLayout, url: str) -> str:
    """Creates an admin key and stores it in the home. Returns its name once it is valid. Errors: Unreachable,
    NotFound."""
    record = read_supervisor(layout)
    if record is None:
        raise Unreachable(f"no server runs in {layout.home}", hint="start it with `fs up`, then recover its key")
    text = new_key_text().text
    try:
        with redis.Redis.from_url(record.redis_url, socket_timeout=KNOWN_S) as client:
            name = _put(client, text)
    except redis.RedisError as error:
        raise Unreachable(f"the system's Redis does not answer: {error}", hint="see `fs status`") from error
    write_key_file(layout.key, text)
    layout.open.unlink(missing_ok=True)
    _await(Address(url, text))
    return name


def _put(client: redis.Redis, text: str) -> str:
    """Writes the key under a name that no key has had. Errors: NotFound."""
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
    ends = time.monotonic() + KNOWN_S
    with ApiClient(address) as server:
        while True:
            try:
                server.get("/api/v1/keys", list[KeyInfo])
                return
            except Unauthorized:
                if time.monotonic() > ends:
                    raise
                time.sleep(POLL_S)
