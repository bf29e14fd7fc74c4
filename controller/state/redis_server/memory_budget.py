"""The memory budget of Redis: what each family of keys may hold, when it is nearly full, how long traces stay. Pure.

Every family but one is bounded by its own rules: logs and events by number and size, answers by size and time, history
by time. Traces are not, as there is one a call: they give way before Redis is full, because they only inform people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.sizes import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    prefixes: tuple[str, ...]
    share: float
    """Share of the limit beyond which a warning says so."""
    advice: str
    many: tuple[str, ...] = ()
    """Prefixes of keys that are many and alike, so that some of them are measured for all."""


FAMILIES = (
    Family(
        name="traces", prefixes=("fs:trace:", "fs:plan:", "fs:learned:"), share=0.25,
        many=("fs:trace:", "fs:plan:", "fs:learned:"),
        advice="they are kept for a shorter time by themselves; give Redis more memory to keep them for a day",
    ),
    Family(
        name="logs", prefixes=("fs:logs:", "fs:log_bytes:"), share=0.25,
        advice="functions that log much have the newest lines only; log less, or give Redis more memory",
    ),
    Family(
        name="async calls", prefixes=("fs:invocation:", "fs:invocations:"), share=0.25,
        many=("fs:invocation:", "fs:invocations:"),
        advice="keep answers for a shorter time (Fs-Result-Ttl), or give Redis more memory",
    ),
    Family(
        name="idempotency", prefixes=("fs:idempotency:",), share=0.15, many=("fs:idempotency:",),
        advice="answers up to 16 KiB are kept for a day; give Redis more memory, or use fewer keys",
    ),
    Family(
        name="ledger", prefixes=("fs:ledger", "fs:open", "fs:durable:"), share=0.2,
        advice="rows go to the object store in segments: look into the controller's log if these are not written",
    ),
    Family(
        name="functions", prefixes=("fs:functions", "fs:versions:", "fs:failures:", "fs:measures"), share=0.2,
        many=("fs:versions:", "fs:failures:"),
        advice="remove functions that nobody uses: `fs rm NAME`",
    ),
    Family(
        name="history", prefixes=("fs:history:",), share=0.15, many=("fs:history:",),
        advice="counts by minute expire by themselves; give Redis more memory",
    ),
    Family(name="audit", prefixes=("fs:audit",), share=0.1, advice="old events go to the object store by themselves"),
)  # fmt: skip
OTHERS = "others"
_MANY = tuple(prefix for family in FAMILIES for prefix in family.many)
LEAST_BYTES = 64 * MIB
"""Size below which a family is never worth a warning."""
ALARM = 0.75
"""Share of the limit that is an alarm: the rest lasts while someone acts."""
DAY_S = 24 * 3600
KEPT_S = ((0.5, DAY_S), (0.65, 6 * 3600), (0.75, 3600), (0.85, 600))
"""How long a trace is kept while no more than that share is used; beyond the last, only traces of failed calls."""
FAILED_S = 600


def family_of(key: str) -> str:
    return next((family.name for family in FAMILIES if key.startswith(family.prefixes)), OTHERS)


def is_one_of_many(key: str) -> bool:
    return key.startswith(_MANY)


def pressure(used_bytes: int, limit_bytes: int, traces_bytes: int) -> float:
    """How full it is, by all that it holds or, if that is more, by traces alone, whose share is half of the way."""
    if not limit_bytes:
        return 0.0
    return max(used_bytes / limit_bytes, 0.5 * traces_bytes / (limit_bytes * FAMILIES[0].share))


def trace_kept_s(full: float, *, failed: bool) -> int:
    """How long the trace of a call is kept; 0: not at all."""
    kept_s = next((kept_s for share, kept_s in KEPT_S if full <= share), 0)
    return max(kept_s, FAILED_S) if failed else kept_s


def memory_problems(
    used_bytes: int, limit_bytes: int, families: Mapping[str, int], *, limited: bool, size: str
) -> list[str]:
    """What is too much, each with what to do. `size`: the sentence "6.1 GiB of 8.0 GiB"."""
    found = []
    if limit_bytes and used_bytes > ALARM * limit_bytes:
        most = "its maxmemory" if limited else "half of its machine's memory, and it has no maxmemory"
        end = "when it is full, nothing is deployed, started or booked"
        found.append(f"{size} of memory is used ({used_bytes / limit_bytes:.0%} of {most}): {end}; give it more")
    for family in FAMILIES:
        held = families.get(family.name, 0)
        if held > max(LEAST_BYTES, family.share * limit_bytes):
            found.append(
                f"{family.name} hold {held / limit_bytes:.0%} of the memory that Redis may use, and "
                f"{family.share:.0%} is theirs: {family.advice}"
            )
    return found
