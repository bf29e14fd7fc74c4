"""The price sheet: which rate applies from when. Gateways rate calls by it, nodes the idle time of kept workers.

Sheets are numbered and never changed or withdrawn: a new one applies from a time in the future, so that every gateway
and node knows it by then, and each row names the sheet of its rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from ..errors import InvalidInput
from ..node.devices import is_device_type
from .ledger import KEPT_NUSD_PER_GIB_S, PRICE_NUSD_PER_GIB_S

LEAD_MS = 60_000
"""Minimum notice of a sheet: gateways and nodes read once a second, and may be disconnected for a while."""

AHEAD_MAX_MS = 366 * 86_400_000
"""Maximum notice: a sheet is never withdrawn, and the next applies after it. One of the year 9999 would be the last."""
RATE_MAX_NUSD = 10 * 10**9
"""Maximum rate: ten dollars, so that the cost of a function's day stays within 64 bits."""


class PriceSheet(msgspec.Struct, frozen=True, kw_only=True):
    """Nano-dollars for a GiB during a second: of worker memory, and of device memory by the type of the device."""

    version: int
    from_unix_ms: int
    execute_nusd_per_gib_s: int
    idle_nusd_per_gib_s: int
    """Rate of the idle time of workers that are kept because of `min`."""
    device_nusd_per_gib_s: dict[str, int] = {}
    """Rates of device memory by type, for both; a type that is not listed costs nothing."""

    def device_rate(self, device_type: str) -> int:
        return self.device_nusd_per_gib_s.get(device_type, 0)


FIRST = PriceSheet(
    version=1,
    from_unix_ms=0,
    execute_nusd_per_gib_s=PRICE_NUSD_PER_GIB_S,
    idle_nusd_per_gib_s=KEPT_NUSD_PER_GIB_S,
)


def in_force(sheets: Sequence[PriceSheet], unix_ms: int) -> PriceSheet:
    """The price sheet that applies at that time. `sheets` are ordered by version, and so by the time they apply
    from."""
    at = bisect_right(sheets, unix_ms, key=lambda sheet: sheet.from_unix_ms)
    return sheets[at - 1] if at else FIRST


def check_next(sheets: Sequence[PriceSheet], sheet: PriceSheet, now_unix_ms: int) -> None:
    """Checks that a sheet may follow the known ones. Errors: InvalidInput."""
    devices = sheet.device_nusd_per_gib_s
    rates = (sheet.execute_nusd_per_gib_s, sheet.idle_nusd_per_gib_s, *devices.values())
    if min(rates) < 0 or max(rates) > RATE_MAX_NUSD:
        raise InvalidInput(f"a rate is 0 or more, and at most ${RATE_MAX_NUSD // 10**9} for a GiB and a second")
    for name in devices:
        if not is_device_type(name):
            raise InvalidInput(
                f"device {name[:80]!r} is no type that a device could have", hint="`fs nodes` shows them: H100"
            )
    earliest_unix_ms = max(now_unix_ms + LEAD_MS, *(known.from_unix_ms + 1 for known in sheets), 0)
    if sheet.from_unix_ms < earliest_unix_ms:
        raise InvalidInput(
            f"price sheet {sheet.version} would apply too early: {_utc(earliest_unix_ms)} is the earliest",
            hint=f"rates change for what is to come: at least {LEAD_MS // 1000} s ahead, and after the last change",
        )
    if sheet.from_unix_ms > now_unix_ms + AHEAD_MAX_MS:
        raise InvalidInput(
            f"price sheet {sheet.version} would apply more than a year ahead",
            hint="a sheet cannot be withdrawn, and rates cannot change before it applies: set it when it is nearer",
        )


def _utc(unix_ms: int) -> str:
    """The next full second: a sheet from then on is not too early."""
    return datetime.fromtimestamp(min(-(-unix_ms // 1000), _LAST_S), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_LAST_S = 253_402_300_799
"""The last second that has a date, of the year 9999: earlier releases took sheets from any time on."""


def read_sheets(raw: Sequence[bytes]) -> list[PriceSheet]:
    """Decodes all sheets, ordered by version, the first one included. Errors: msgspec.DecodeError."""
    return sorted([FIRST, *(msgspec.json.decode(data, type=PriceSheet) for data in raw)], key=lambda s: s.version)
