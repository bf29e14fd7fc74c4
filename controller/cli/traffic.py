"""What `fs` says of the versions that calls go to, and how a version is named on the command line."""

from __future__ import annotations

from ..schemas.functions import Traffic


def reference(text: str) -> int | str:
    """ "3" and "v3" are numbers, everything else an alias."""
    number = text.removeprefix("v")
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 9 else text


def shown(traffic: Traffic) -> str:
    """ "hello: calls go to version 3; prod is 2; version 4 is being tried"."""
    if traffic.split:
        calls = " and ".join(f"{share.percent}% to version {share.version}" for share in traffic.split)
    else:
        calls = f"to version {traffic.live}"
    facts = [f"{traffic.name}: calls go {calls}"]
    facts += [f"{alias} is {version}" for alias, version in sorted(traffic.aliases.items())]
    if traffic.trying is not None:
        facts.append(f"version {traffic.trying} is being tried")
    return "; ".join(facts)
