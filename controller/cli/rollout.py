"""Rollout of a new version: waits until calls go to it, or says why they do not; prints a function's traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

import msgspec

from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.errors import FleetError, Unavailable, error_from
from fleetstart.runtime.contract.ids import Version

from ..schemas.functions import Deployed, Traffic
from . import output
from .api_client import ApiClient

POLL_S = 0.1
MESSAGE_AFTER_S = 1.0
"""A rollout that takes longer prints a message."""
LOGS_TAIL = 1000
LOGS_SHOWN = 20


def is_serving(traffic: Traffic, version: Version) -> bool:
    """True if calls go to the version; not yet while it is tried. Errors: why it was rejected; Unavailable if another
    change replaced it."""
    if traffic.trying == version:
        return False
    if traffic.rejected == version and traffic.error is not None:
        raise _rejection(traffic, version)
    if version in {traffic.live, *traffic.aliases.values(), *(share.version for share in traffic.split)}:
        return True
    raise Unavailable(
        f"the rollout of {traffic.name}@{version} ended when another change moved the calls",
        hint=f"`fs versions {traffic.name}` lists them; `fs alias {traffic.name} live {version}` makes this one live",
    )


def _rejection(traffic: Traffic, version: Version) -> FleetError:
    info = traffic.error
    assert info is not None
    if traffic.live == version:  # there is no other version that calls could go to
        text = f"{traffic.name}@{version} does not start: {info.message}"
        mend = "calls to it fail until it starts; deploy it again when it is mended"
        return error_from(
            msgspec.structs.replace(info, message=text, hint=f"{mend}; {info.hint}" if info.hint else mend)
        )
    keeps = f"{traffic.name}@{traffic.live} keeps serving"
    return error_from(
        msgspec.structs.replace(
            info,
            message=f"{traffic.name}@{version} gets no calls: {info.message}",
            hint=f"{keeps}; {info.hint}" if info.hint else keeps,
        )
    )


def wait_until_serving(server: ApiClient, deployed: Deployed, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Waits until calls go to the version. Errors: those of `is_serving`, after the last log lines of its workers."""
    path = f"/api/v1/functions/{quote(deployed.name, safe='')}/traffic"
    began_s = time.monotonic()
    message_shown = False
    try:
        while not is_serving(server.get(path, Traffic), deployed.version):
            if not message_shown and time.monotonic() - began_s > MESSAGE_AFTER_S:
                message_shown = True
                output.message(f"starting a worker of {deployed.name}@{deployed.version} before calls go to it")
            sleep(POLL_S)
    except FleetError:
        for line in _last_lines(server, deployed):
            output.message(f"    {line.text}")
        raise


def _last_lines(server: ApiClient, deployed: Deployed) -> Iterator[LogLine]:
    lines = server.log_lines(deployed.name, tail=LOGS_TAIL, follow=False)
    yield from [line for line in lines if line.version == deployed.version and line.stream != "system"][-LOGS_SHOWN:]


def version_or_alias(text: str) -> int | str:
    """Parses "3" or "v3" as a version, anything else as an alias."""
    number = text.removeprefix("v")
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 9 else text


def describe_traffic(traffic: Traffic) -> str:
    """Describes a function's traffic: "hello: calls go to version 3; prod is 2; version 4 is being tried"."""
    if traffic.split:
        calls = " and ".join(f"{share.percent}% to version {share.version}" for share in traffic.split)
    else:
        calls = f"to version {traffic.live}"
    facts = [f"{traffic.name}: calls go {calls}"]
    facts += [f"{alias} is {version}" for alias, version in sorted(traffic.aliases.items())]
    if traffic.trying is not None:
        facts.append(f"version {traffic.trying} is being tried")
    return "; ".join(facts)
