"""The ledger's rows: one for each invocation, one for each phase of a worker's life; integers only.

Money is in nano-dollars. Execution is billed, and the idle time of workers that the user asked to have kept (`min`);
start, fetch, load, other idle time and failed starts stand in the ledger at rate 0, so that everybody sees what was
waived. A row has an id that follows from what it records, and the ledger takes an id once: a
writer that is not sure may write again, at any time. `ledger.lua` says how that is known without keeping all ids.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from .. import redis_keys as keys
from ..ids import FunctionName, InvocationId, NodeId, Version, WorkerId
from ..node.orders import SecondEngine
from ..sizes import GIB
from ..timeline import Timeline

StartKind = Literal["hot", "standby", "warm", "cold"]

PRICE_NUSD_PER_GIB_S = 16_667
"""Nano-dollars for one GiB of worker memory during one second: what the large clouds ask for functions."""
KEPT_NUSD_PER_GIB_S = 4_167
"""The same for the idle time of workers kept by `min`: what the large clouds charge for provisioned concurrency."""


def cost_nusd(billed_ms: int, memory_bytes: int, rate_nusd_per_gib_s: int) -> int:
    """Nano-dollars, rounded to nearest; integers throughout, so that every reader gets the same sum."""
    product = billed_ms * memory_bytes * rate_nusd_per_gib_s
    divisor = 1000 * GIB
    return (2 * product + divisor) // (2 * divisor)


def dollars(nusd: int) -> str:
    """Formats nano-dollars as dollars, for people and headers: "0.000000417"."""
    return f"{nusd // 10**9}.{nusd % 10**9:09d}"


class InvocationRow(msgspec.Struct, frozen=True, kw_only=True, tag="invocation"):
    id: InvocationId
    function: FunctionName
    version: Version
    worker: WorkerId = WorkerId("")
    status: int
    """HTTP status that the caller got; 499 if the caller went away first, 502 if its gateway died."""
    error: str = ""
    """Error code, if there was one."""
    start: StartKind = "hot"
    accepted_unix_ms: int
    queue_ms: int
    """Time from acceptance until a worker had the call, cold start included; never billed."""
    billed_ms: int
    """The call's share of its worker's busy time."""
    memory_bytes: int
    rate_nusd_per_gib_s: int = PRICE_NUSD_PER_GIB_S
    cost_nusd: int
    """Of memory and devices together."""
    device_type: str = ""
    """Type of its worker's devices; empty: it had none."""
    device_bytes: int = 0
    """Device memory that its worker had for itself."""
    device_rate_nusd_per_gib_s: int = 0
    attempts: int = 1
    total_ms: int = 0
    """Time from acceptance until the answer was complete; 0 in rows of earlier releases and of lost calls."""
    first_byte_ms: int | None = None
    """Time from acceptance until a worker began to answer; None if none did."""
    price: int = 1
    """Version of the price sheet that the rate is from: the one in force when the call was accepted."""
    key: str = ""
    """Name of the API key that the caller showed; empty where there are no keys."""
    tags: dict[str, str] = {}
    """The tags of the function's version."""
    project: str = ""
    """The function's project; empty, for `default`, in rows from before there were projects."""
    parent: InvocationId = InvocationId("")
    """The call for which a function made this one; empty for a client's call."""
    caller: FunctionName = FunctionName("")
    """The function that made it; empty for a client's call."""
    request_id: str = ""
    """The caller's own `X-Request-Id`, for people: several calls may have the same one."""


WorkerPhase = Literal["start", "fetch", "load", "execute", "idle", "standby", "failed"]


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """An interval of a worker's life. `execute` rows are the worker's busy time, billed by call: rate 0 here."""

    id: str
    """worker/phase/number"""
    worker: WorkerId
    node: NodeId
    function: FunctionName
    version: Version
    phase: WorkerPhase
    started_unix_ms: int
    duration_ms: int
    memory_bytes: int
    rate_nusd_per_gib_s: int = 0
    """0: waived, as all is but the idle time of workers that are kept because of `min`."""
    cost_nusd: int = 0
    device_type: str = ""
    device_bytes: int = 0
    device_rate_nusd_per_gib_s: int = 0
    price: int = 1
    tags: dict[str, str] = {}
    project: str = ""
    # Measured, for information: nothing is charged by it. None: not measured, as in rows of earlier releases.
    cpu_ms: int | None = None
    """Processor time of all the worker's processes since its row before."""
    memory_peak_bytes: int | None = None
    """The most memory that it has had so far, as its control group counts it."""
    received_bytes: int | None = None
    """Bytes from the hosts in its function's list since its row before."""
    sent_bytes: int | None = None
    """Bytes to them."""
    device_peak_bytes: int | None = None
    """The most memory of GPUs that its processes were seen with so far."""


LedgerRow = InvocationRow | PhaseRow


def began_unix_ms(row: LedgerRow) -> int:
    """The time at which the recorded work began. The time of booking is in the row's entry id."""
    return row.accepted_unix_ms if isinstance(row, InvocationRow) else row.started_unix_ms


class OpenInvocation(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted call without a row yet. Written on acceptance, removed with the row; left over when a gateway
    dies."""

    id: InvocationId
    gateway: str
    function: FunctionName
    version: Version
    accepted_unix_ms: int
    key: str = ""
    project: str = ""
    parent: InvocationId = InvocationId("")
    caller: FunctionName = FunctionName("")
    request_id: str = ""
    tags: dict[str, str] = {}
    """For its row, which another gateway writes if this one dies."""


LOST_GATEWAY = "gateway_lost"
"""Error in the row of a call whose gateway was lost: what became of the call is not known."""
CLIENT_GONE = "client_gone"
"""Error in the row of a call whose caller has left, or whose idempotency key was taken by another one."""
CALLED_KEPT = 50
"""Calls of other functions that a trace names; its timeline has all of them."""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the function made while its own call ran; it has a row and a trace of its own."""

    id: InvocationId
    function: FunctionName
    status: int
    error: str = ""
    took_ms: float


class TraceContext(msgspec.Struct, frozen=True):
    """An invocation's place in a trace (W3C Trace Context); ids in hex."""

    trace_id: str = ""
    span_id: str = ""
    """The attempt's span, the parent of spans that the handler makes."""
    parent_id: str = ""
    """The caller's span; empty if the trace begins here."""
    sampled: bool = False
    """True if its spans are recorded; decided where the trace began."""
    state: str = ""
    """The `tracestate` of other systems, passed on unchanged."""


class InvocationTrace(msgspec.Struct, frozen=True, kw_only=True):
    """An invocation's row with its timeline, as `fs trace` prints it."""

    row: InvocationRow
    timeline: Timeline
    isolation: str = ""
    pooled: bool = False
    events: int = 0
    """Number of events that the worker sent, of an event stream."""
    relayed: tuple[int, ...] = ()
    """Stages that the first stage's node could reach through the object store only."""
    node: str = ""
    """The node of its worker."""
    fetched: dict[str, int] = {}
    """Bytes of weights by where they came from, of the start that it waited for."""
    second_engine: SecondEngine | None = None
    """The engine behind the first one of its worker, when the call ended; None: it has one engine."""
    context: TraceContext = TraceContext()
    called: tuple[CalledFunction, ...] = ()
    """The calls of other functions that it made, in the order in which they ended; `CALLED_KEPT` at most."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    unix_ms: int
    worker: WorkerId
    version: Version
    stream: Literal["stdout", "stderr", "system"]
    text: str
    invocation: str = ""
    """The invocation that printed the line, if it is known."""


APPEND_KEYS = (
    keys.LEDGER,
    keys.LEDGER_IDS,
    keys.OPEN,
    keys.LEDGER_HORIZON,
    keys.LEDGER_LATE,
    keys.LEDGER_SPENT,
)


@cache
def append_script() -> str:
    """The Lua that writes a row once; KEYS and ARGV are documented at its top."""
    return files(__package__).joinpath("ledger.lua").read_text()


def append_args(row: LedgerRow) -> tuple[str | bytes | int, ...]:
    """ARGV of the script; its KEYS are APPEND_KEYS."""
    return row.id, msgspec.json.encode(row), began_unix_ms(row), row.function, row.cost_nusd
