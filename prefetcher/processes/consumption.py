"""What a worker has used, as its control group, its proxy and the driver of its GPUs count it: columns of its rows.

For information: nothing is charged by it. What cannot be measured is left out, and is no zero: processor time and
memory without control groups, the network of functions that have the node's, the memory of devices without NVML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleetstart.runtime.contract.billing.ledger import PhaseRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """Totals of one worker since it was taken; None: not measured."""

    cpu_ns: int | None = None
    memory_peak_bytes: int | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


class ConsumptionMeter:
    """Writes a worker's totals into its rows: what grew since the last row into one, what is a maximum into all."""

    def __init__(self) -> None:
        self._cpu_ms = 0
        self._received_bytes = 0
        self._sent_bytes = 0
        self._device_peak_bytes: int | None = None

    def note_device(self, used_bytes: int) -> None:
        """Takes a look at its memory of GPUs: it is only known while the processes live."""
        self._device_peak_bytes = max(used_bytes, self._device_peak_bytes or 0)

    def onto(self, rows: Sequence[PhaseRow], totals: Consumption) -> list[PhaseRow]:
        """Rows with what was used since those before. Of several, the busy time has it: the rest used next to none."""
        if not rows:
            return []
        grown = self._grown(totals)
        busiest = next((number for number, row in enumerate(rows) if row.phase == "execute"), 0)
        peaks = {"memory_peak_bytes": totals.memory_peak_bytes, "device_peak_bytes": self._device_peak_bytes}
        none = {name: None if value is None else 0 for name, value in grown.items()}
        return [
            msgspec.structs.replace(row, **(grown if number == busiest else none), **peaks)
            for number, row in enumerate(rows)
        ]

    def _grown(self, totals: Consumption) -> dict[str, int | None]:
        """Whole milliseconds and bytes since the call before; a process that replaced another begins below it."""
        grown: dict[str, int | None] = {"cpu_ms": None, "received_bytes": None, "sent_bytes": None}
        if totals.cpu_ns is not None:
            cpu_ms = totals.cpu_ns // 1_000_000
            grown["cpu_ms"], self._cpu_ms = max(0, cpu_ms - self._cpu_ms), cpu_ms
        if totals.received_bytes is not None:
            grown["received_bytes"] = totals.received_bytes - self._received_bytes
            self._received_bytes = totals.received_bytes
        if totals.sent_bytes is not None:
            grown["sent_bytes"], self._sent_bytes = totals.sent_bytes - self._sent_bytes, totals.sent_bytes
        return grown
