"""Traffic of a function: the version that a call goes to, and its changes by aliases, splits, deploys and rollbacks.

Pure: records in, records out; versions themselves never change. `registry` writes the records, `rollouts` probes new
versions, the gateway chooses a version for each call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from zlib import crc32

from msgspec.structs import replace

from fleetstart.runtime.contract.errors import ErrorInfo, InvalidInput, NotFound
from fleetstart.runtime.contract.function.spec import FunctionSpec, Limits, Scale
from fleetstart.runtime.contract.ids import LIVE, FunctionName, Version

from .records import Failure, FunctionRecord, Rejection, Rollout, ScaleOverride

ALIASES_MAX = 20
PAST_KEPT = 20
"""Steps that `fs rollback` can go back one by one; any version can still be named."""

_ALIAS = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")


# ── calls ──────────────────────────────────────────────────────────────────────────────────────────


def version_for_call(
    record: FunctionRecord, alias: str, invocation: str, is_broken: Callable[[Version], bool]
) -> Version:
    """The version for a call that names no number. The same invocation id gets the same version, also when repeated.

    A version of the split whose starts are given up gets no calls: those of a canary go to `live`.
    Errors: NotFound.
    """
    if alias != LIVE:
        return version_of_alias(record, alias)
    if not record.split:
        return record.live
    point = crc32(invocation.encode()) % 100
    for version, percent in sorted(record.split.items()):
        point -= percent
        if point < 0:
            return record.live if version != record.live and is_broken(version) else version
    return record.live


def version_of_alias(record: FunctionRecord, alias: str) -> Version:
    """The version that an alias points at. Errors: NotFound, with the known aliases."""
    if alias == LIVE:
        return record.live
    version = record.aliases.get(alias)
    if version is None:
        raise NotFound(
            f"function {record.name} has no alias {alias[:50]!r}",
            hint=f"it has {', '.join([LIVE, *sorted(record.aliases)])}, and numbers: `fs versions {record.name}`",
        )
    return version


def in_service(record: FunctionRecord) -> set[Version]:
    """The versions that calls reach without a number: these are scaled and kept warm by their settings."""
    return {record.live, *record.split, *record.aliases.values()}


def tracked_versions(record: FunctionRecord) -> set[Version]:
    """The versions that schedulers and gateways must know: those in service, and one being rolled out."""
    return in_service(record) | ({record.rollout.version} if record.rollout is not None else set())


# ── changes ────────────────────────────────────────────────────────────────────────────────────────


def with_live(record: FunctionRecord, version: Version, now_unix_ms: int) -> FunctionRecord:
    """Sends all calls to a version. Another one than before starts without `fs scale` overrides."""
    if version == record.live:
        return replace(record, split={})
    past = [*record.past, record.live][-PAST_KEPT:]
    return replace(record, live=version, split={}, past=past, scaled=None, deployed_unix_ms=now_unix_ms)


def with_alias(record: FunctionRecord, alias: str, version: Version, now_unix_ms: int) -> FunctionRecord:
    """Points an alias at a version. Errors: InvalidInput."""
    if alias == LIVE:
        return with_live(record, version, now_unix_ms)
    check_alias(alias)
    aliases = {**record.aliases, alias: version}
    if len(aliases) > ALIASES_MAX:
        raise InvalidInput(
            f"function {record.name} has {ALIASES_MAX} aliases already",
            hint=f"remove one: fs alias {record.name} {min(record.aliases)} --rm",
        )
    return replace(record, aliases=aliases)


def without_alias(record: FunctionRecord, alias: str) -> FunctionRecord:
    """Removes an alias. Errors: NotFound, InvalidInput."""
    if alias == LIVE:
        raise InvalidInput("live cannot be removed", hint=f"`fs rm {record.name}` removes the function")
    version_of_alias(record, alias)
    return replace(record, aliases={name: version for name, version in record.aliases.items() if name != alias})


def check_alias(alias: str) -> str:
    if not _ALIAS.fullmatch(alias):
        raise InvalidInput(
            f"alias {alias[:50]!r} is not allowed",
            hint="use 1 to 32 of a-z, 0-9 and -, a letter first, for example prod",
        )
    return alias


def with_split(record: FunctionRecord, weights: Mapping[Version, int], now_unix_ms: int) -> FunctionRecord:
    """Splits the calls. `live` stays if it has a share, else the version with the largest is live. Errors:
    InvalidInput."""
    if any(percent < 0 for percent in weights.values()) or sum(weights.values()) != 100:
        shown = " + ".join(str(percent) for percent in weights.values()) or "nothing"
        raise InvalidInput(
            f"the shares must be 0 to 100 and come to 100, got {shown} = {sum(weights.values())}",
            hint=f"for example: fs split {record.name} {record.live}=100",
        )
    split = {version: percent for version, percent in weights.items() if percent}
    base = record.live if record.live in split else max(split, key=lambda version: (split[version], version))
    return replace(with_live(record, base, now_unix_ms), split=split if len(split) > 1 else {})


def scaled(record: FunctionRecord, change: ScaleOverride | None) -> FunctionRecord:
    """Changes the `fs scale` overrides; None removes them, fields that are None stay. Errors: InvalidSpec."""
    if change is None:
        return replace(record, scaled=None)
    fields = {name: value for name in ScaleOverride.__struct_fields__ if (value := getattr(change, name)) is not None}
    merged = replace(record.scaled or ScaleOverride(), **fields)
    Scale(
        min=merged.min or 0,
        max=max(1, merged.min or 1) if merged.max is None else merged.max,
        keep_alive_s=merged.keep_alive_s or 0.0,
    )  # says what is wrong with it
    if merged.rate is not None or merged.concurrent is not None:
        Limits(rate=merged.rate or 0.0, concurrent=merged.concurrent or 0)
    Limits(rate=1.0, burst=merged.burst or 0)
    return replace(record, scaled=merged)


def scale_of(record: FunctionRecord | None, spec: FunctionSpec) -> Scale:
    """The scaling limits of a version in effect: its own, with the overrides of `fs scale`."""
    change = record.scaled if record is not None else None
    if change is None:
        return spec.scale
    least = spec.scale.min if change.min is None else change.min
    most = spec.scale.max if change.max is None else change.max
    if least > most:
        least, most = (least, least) if change.max is None else (most, most)
    keep_alive_s = spec.scale.keep_alive_s if change.keep_alive_s is None else change.keep_alive_s
    return Scale(min=least, max=most, keep_alive_s=keep_alive_s, standby_s=spec.scale.standby_s)


def limits_of(record: FunctionRecord | None, spec: FunctionSpec) -> Limits:
    """The rate limits of a version in effect: its own, with the overrides of `fs scale`."""
    change = record.scaled if record is not None else None
    if change is None:
        return spec.limits
    rate = spec.limits.rate if change.rate is None else change.rate
    burst = spec.limits.burst if change.burst is None else change.burst
    concurrent = spec.limits.concurrent if change.concurrent is None else change.concurrent
    return Limits(rate=rate, burst=burst if rate else 0, concurrent=concurrent)


def rolled_back(record: FunctionRecord, to: Version | None, now_unix_ms: int) -> FunctionRecord:
    """Rolls back the last change: a rollout in progress, a split, or the last change of `live`.

    Errors: InvalidInput if there is nothing to go back to.
    """
    dropped = replace(record, rollout=None)
    if to is not None:
        return with_live(dropped, to, now_unix_ms)
    if record.rollout is not None:
        return dropped
    if record.split:
        return replace(record, split={})
    if not record.past:
        raise InvalidInput(
            f"function {record.name} has had no other version live than {record.live}",
            hint=f"`fs versions {record.name}` lists all there are; `fs rollback {record.name} VERSION` takes any",
        )
    back = with_live(record, record.past[-1], now_unix_ms)
    return replace(back, past=record.past[:-1])


# ── deploys ────────────────────────────────────────────────────────────────────────────────────────


def created(name: FunctionName, plan: Rollout, *, probe: bool) -> FunctionRecord:
    """The record of a new function. Its first version is live, since calls have nowhere else to go: with `probe` they
    wait for the start that the rollout tries.

    Errors: InvalidInput.
    """
    check_rollout(plan)
    plan = replace(plan, percent=100)
    begun = FunctionRecord(
        name=name, live=plan.version, first=plan.version, deployed_unix_ms=plan.begun_unix_ms, rollout=plan
    )
    return begun if probe else promoted(begun, plan.begun_unix_ms)


def deployed(record: FunctionRecord, plan: Rollout, *, probe: bool, failed: Rejection | None = None) -> FunctionRecord:
    """The record after a deploy of a version; with `probe` its traffic changes only by `promoted`.

    What is in effect already changes nothing, unless its last start failed: then it is tried again. `failed` is that
    start, which only the record remembers after the deploy.

    Errors: InvalidInput for a canary of what is live.
    """
    check_rollout(plan)
    if plan.percent < 100 and plan.version == record.live:
        raise InvalidInput(
            f"version {plan.version} of {record.name} is live already, and cannot be its own canary",
            hint="nothing has changed since it was deployed",
        )
    fresh = replace(record, rollout=None, rejected=None)
    if _in_effect(record, plan):
        rejected = record.rejected if record.rejected is not None and record.rejected.version == plan.version else None
        trying = record.rollout is not None and record.rollout.version == plan.version
        failed = failed or rejected
        if not (probe and (trying or failed)):
            return replace(fresh, rejected=failed)
    begun = replace(fresh, rollout=plan)
    return begun if probe else promoted(begun, plan.begun_unix_ms)


def check_rollout(plan: Rollout) -> None:
    if plan.alias != LIVE:
        check_alias(plan.alias)
    if not 1 <= plan.percent <= 100:
        raise InvalidInput(f"a canary gets 1% to 99% of the calls, not {plan.percent}%")
    if plan.percent < 100 and plan.alias != LIVE:
        raise InvalidInput(
            f"a canary gets a part of the calls of live, and alias {plan.alias} all or none",
            hint="give --canary or --alias, not both",
        )


def _in_effect(record: FunctionRecord, plan: Rollout) -> bool:
    if plan.alias != LIVE:
        return record.aliases.get(plan.alias) == plan.version
    if plan.percent < 100:
        return record.split.get(plan.version) == plan.percent
    return record.live == plan.version and not record.split


def ended(record: FunctionRecord, error: ErrorInfo | None, now_unix_ms: int) -> FunctionRecord:
    """Ends a rollout: the version is promoted, or rejected for the error, or because its traffic is not possible."""
    if error is not None:
        return rejected(record, error, now_unix_ms)
    try:
        return promoted(record, now_unix_ms)
    except InvalidInput as impossible:
        return rejected(record, impossible.info(), now_unix_ms)


def promoted(record: FunctionRecord, now_unix_ms: int) -> FunctionRecord:
    """Ends a rollout successfully: the version gets its traffic. A canary that was made live meanwhile leaves the
    traffic as it is.

    Errors: InvalidInput if other changes came meanwhile that exclude it, such as the last alias that there may be.
    """
    plan = record.rollout
    assert plan is not None
    done = replace(record, rollout=None)
    if plan.alias != LIVE:
        return with_alias(done, plan.alias, plan.version, now_unix_ms)
    if plan.percent == 100:
        return with_live(done, plan.version, now_unix_ms)
    if plan.version == record.live:
        return done
    return with_split(done, {record.live: 100 - plan.percent, plan.version: plan.percent}, now_unix_ms)


def rejected(record: FunctionRecord, error: ErrorInfo, now_unix_ms: int) -> FunctionRecord:
    """Ends a rollout by rejection: the version gets no calls, and traffic stays as it was."""
    plan = record.rollout
    assert plan is not None
    return replace(record, rollout=None, rejected=Rejection(version=plan.version, error=error, unix_ms=now_unix_ms))


def with_start(record: FunctionRecord, ready_unix_ms: int) -> FunctionRecord:
    """Notes that a worker of the live version got ready then: it forgets an earlier failure of that version."""
    rejected = record.rejected
    if rejected is not None and rejected.version == record.live and rejected.unix_ms < ready_unix_ms:
        rejected = None
    return replace(record, started=record.live, rejected=rejected)


def last_failure(record: FunctionRecord, failure: Failure | None) -> Rejection | None:
    """The last failed start of the live version, if none has succeeded since. `failure` is the scheduler's record."""
    rejected = record.rejected
    if failure is not None:
        return Rejection(version=record.live, error=failure.error, unix_ms=failure.last_unix_ms)
    return rejected if rejected is not None and rejected.version == record.live else None


def roles(record: FunctionRecord, version: Version) -> list[str]:
    """The roles of a version, for display: `live`, `10%`, aliases, `being tried`, `rejected`."""
    found: list[str] = [LIVE] if version == record.live else []
    if version in record.split:
        found.append(f"{record.split[version]}%")
    found += sorted(alias for alias, target in record.aliases.items() if target == version)
    if record.rollout is not None and record.rollout.version == version:
        found.append("being tried")
    if record.rejected is not None and record.rejected.version == version:
        found.append("rejected")
    return found
