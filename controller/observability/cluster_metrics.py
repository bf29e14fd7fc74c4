"""Metrics of the whole system as this controller's view has it: load, nodes, memory, predictions, budgets. Pure.

Every controller reports the same here, as far as its view is up to date; `call_metrics` differ between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.node.reports import NodeReport

from ..peers.report import kept_states, reported_copies
from ..schemas.functions import BudgetInfo
from ..state.view import View
from .prometheus import MetricFamily


def families(view: View, budgets: Iterable[BudgetInfo], now_unix_ms: int, now_ns: int) -> list[MetricFamily]:
    nodes = [seen.report for seen in view.nodes.values() if not seen.lost(now_ns)]
    return [
        *_loads(view, now_unix_ms),
        *_workers(view),
        *_starts(view),
        *_nodes(nodes),
        *_memory(nodes),
        *_copies(view, now_ns),
        *_bytes(nodes),
        *_prompts(nodes),
        *_prediction(view),
        *_unreadable(view),
        *_budgets(budgets),
    ]


def _loads(view: View, now_unix_ms: int) -> list[MetricFamily]:
    queued = MetricFamily("fleetstart_queued_calls", "gauge", "Calls that wait for a worker, at all gateways.")
    running = MetricFamily("fleetstart_running_calls", "gauge", "Calls on workers, from all gateways.")
    oldest = MetricFamily("fleetstart_oldest_wait_seconds", "gauge", "Wait of the call that has waited longest.")
    stored = MetricFamily("fleetstart_async_calls", "gauge", "Async calls that wait or run.")
    for function, count in sorted(view.async_calls.items()):
        stored.add(count, function=function)
    for key, load in sorted(view.loads().items()):
        name, _, version = key.rpartition("@")
        queued.add(load.queued, function=name, version=version)
        running.add(load.running, function=name, version=version)
        if load.oldest_unix_ms:
            oldest.add(max(0, now_unix_ms - load.oldest_unix_ms) / 1000, function=name, version=version)
    return [queued, running, oldest, stored]


def _workers(view: View) -> list[MetricFamily]:
    family = MetricFamily("fleetstart_workers", "gauge", "Workers by state.")
    counts = Counter((s.function, s.version, s.state, s.node) for s in view.statuses.values())
    for (name, version, state, node), count in sorted(counts.items()):
        family.add(count, function=name, version=version, state=state, node=node)
    return [family]


def _prompts(nodes: list[NodeReport]) -> list[MetricFamily]:
    all_tokens = MetricFamily(
        "fleetstart_prompt_tokens_total", "counter", "Tokens of prompts that language models answered."
    )
    cached = MetricFamily(
        "fleetstart_cached_prompt_tokens_total",
        "counter",
        "Those whose keys and values a worker had from a call before.",
    )
    for node in nodes:
        for key, speed in sorted(node.speeds.items()):
            if speed.prompt_tokens:
                name, _, version = key.rpartition("@")
                all_tokens.add(speed.prompt_tokens, function=name, version=version, node=node.node)
                cached.add(speed.cached_tokens, function=name, version=version, node=node.node)
    return [all_tokens, cached]


def _starts(view: View) -> list[MetricFamily]:
    failed = MetricFamily("fleetstart_failed_starts", "gauge", "Consecutive failed starts of a version.")
    for key, failure in sorted(view.failures.items()):
        failed.add(failure.count, function=key.name, version=key.version, code=failure.error.code)
    return [failed]


def _nodes(nodes: list[NodeReport]) -> list[MetricFamily]:
    memory = MetricFamily("fleetstart_node_memory_bytes", "gauge", "Memory that workers and segments may use together.")
    used = MetricFamily(
        "fleetstart_node_memory_used_bytes", "gauge", "Memory that workers and segments use or have reserved."
    )
    cores = MetricFamily("fleetstart_node_cores", "gauge", "Cores of the node.")
    devices = MetricFamily("fleetstart_device_memory_bytes", "gauge", "Memory of a node's device.")
    reserved = MetricFamily(
        "fleetstart_device_reserved_bytes", "gauge", "Memory of a device that workers have reserved."
    )
    loads = MetricFamily(
        "fleetstart_device_load_bytes_per_second", "gauge", "Measured rate from host memory to a device."
    )
    decodes = MetricFamily(
        "fleetstart_device_decode_bytes_per_second",
        "gauge",
        "Measured rate of weights that decoding reads on a device.",
    )
    for node in nodes:
        for device in node.devices:
            labels = {"node": node.node, "device": device.id, "type": device.type}
            devices.add(device.memory_bytes, **labels)
            reserved.add(device.reserved_bytes, **labels)
            if device.load_bytes_per_s:
                loads.add(device.load_bytes_per_s, **labels)
            if device.decode_bytes_per_s:
                decodes.add(device.decode_bytes_per_s, **labels)
        memory.add(node.memory_bytes, node=node.node)
        used.add(node.memory_used_bytes, node=node.node)
        cores.add(node.cpus, node=node.node)
    return [memory, used, cores, devices, reserved, loads, decodes]


def _memory(nodes: list[NodeReport]) -> list[MetricFamily]:
    pool = MetricFamily(
        "fleetstart_weights_memory_bytes", "gauge", "Memory of a node's segments: used, and free to be used."
    )
    segments = MetricFamily("fleetstart_segments", "gauge", "Checkpoints in a node's memory.")
    ready = MetricFamily("fleetstart_segment_ready_bytes", "gauge", "Bytes of these checkpoints that are in memory.")
    disk = MetricFamily("fleetstart_disk_bytes", "gauge", "Checkpoints that a node's disk keeps.")
    for node in nodes:
        pool.add(node.weights_memory.used_bytes, node=node.node, kind="used")
        pool.add(node.weights_memory.free_bytes, node=node.node, kind="free")
        disk.add(node.disk_bytes, node=node.node)
        counts = Counter(segment.state for segment in node.segments)
        for state, count in sorted(counts.items()):
            segments.add(count, node=node.node, state=state)
            here = sum(segment.ready_bytes for segment in node.segments if segment.state == state)
            ready.add(here, node=node.node, state=state)
    return [pool, segments, ready, disk]


def _copies(view: View, now_ns: int) -> list[MetricFamily]:
    kept = MetricFamily(
        "fleetstart_kept_checkpoints", "gauge", "Checkpoints of which functions keep a copy in memory, by its state."
    )
    copied = MetricFamily("fleetstart_copy_bytes", "gauge", "Bytes in memory of the copies that a node is to keep.")
    counts = Counter(kept_states(view, now_ns).values())
    for state in ("ready", "fetching", "missing"):
        kept.add(counts[state], state=state)
    here: Counter[str] = Counter()
    for copy in reported_copies(view, now_ns):
        here[copy.node] += copy.ready_bytes
    for node, size_bytes in sorted(here.items()):
        copied.add(size_bytes, node=node)
    return [kept, copied]


def _bytes(nodes: list[NodeReport]) -> list[MetricFamily]:
    fetched = MetricFamily("fleetstart_fetched_bytes_total", "counter", "Weights that came to a node, by their source.")
    sent = MetricFamily("fleetstart_peer_sent_bytes_total", "counter", "Weights that other nodes read from a node.")
    rates = MetricFamily(
        "fleetstart_source_bytes_per_second", "gauge", "Measured bandwidth of a source when it was last used."
    )
    waived = MetricFamily(
        "fleetstart_waived_milliseconds_total", "counter", "Worker time that is not billed, by phase."
    )
    kept = MetricFamily(
        "fleetstart_kept_dollars_total", "counter", "Cost of the idle time of workers kept by scale.min."
    )
    egress = MetricFamily(
        "fleetstart_egress_bytes_total", "counter", "Traffic of workers with an egress allow list: in and out."
    )
    refused = MetricFamily(
        "fleetstart_egress_refused_total", "counter", "Connections that were not on an egress allow list."
    )
    for node in nodes:
        for source, size_bytes in sorted(node.fetched_bytes.items()):
            fetched.add(size_bytes, node=node.node, source=source)
        sent.add(node.peer_sent_bytes, node=node.node)
        for source, rate in sorted(node.bytes_per_s.items()):
            if ":" in source:  # of one peer each: as many series as pairs of nodes
                continue
            rates.add(rate, node=node.node, source=source)
        for phase, spent_ms in sorted(node.waived_ms.items()):
            waived.add(spent_ms, node=node.node, phase=phase)
        kept.add(node.kept_nusd / 1e9, node=node.node)
        for direction, size_bytes in sorted(node.egress_bytes.items()):
            egress.add(size_bytes, node=node.node, direction=direction)
        refused.add(node.egress_refused, node=node.node)
    return [fetched, sent, rates, waived, kept, egress, refused]


def _prediction(view: View) -> list[MetricFamily]:
    error = MetricFamily(
        "fleetstart_ttft_prediction_error_ratio", "gauge", "|observed - predicted| / observed, a running mean."
    )
    compared = MetricFamily("fleetstart_ttft_predictions_compared", "gauge", "Predictions that the mean has seen.")
    for key, measures in sorted(view.version_measures.items()):
        if measures.ttft_error.count:
            error.add(measures.ttft_error.value, function=key.name, version=key.version)
            compared.add(measures.ttft_error.count, function=key.name, version=key.version)
    return [error, compared]


def _budgets(budgets: Iterable[BudgetInfo]) -> list[MetricFamily]:
    spent = MetricFamily(
        "fleetstart_budget_spent_ratio", "gauge", "Spent share of a function's budget in its present period."
    )
    for budget in budgets:
        spent.add(budget.spent_nusd / max(1, budget.limit_nusd), function=budget.function, per=budget.per)
    return [spent]


def _unreadable(view: View) -> list[MetricFamily]:
    present = MetricFamily(
        "fleetstart_unreadable_records", "gauge", "Records in Redis that this release cannot read, and skips."
    )
    seen = MetricFamily("fleetstart_unreadable_records_total", "counter", "Such records that were met so far.")
    for kind, count in sorted(Counter(record.kind for record in view.unreadable.all()).items()):
        present.add(count, kind=kind)
    for kind, count in sorted(view.unreadable.total.items()):
        seen.add(count, kind=kind)
    return [present, seen]


class WorkerFailures:
    """Counts workers that failed since this process began: the view forgets them."""

    def __init__(self, view: View) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._view = view
        view.on_worker(self._on_status)

    def _on_status(self, status: WorkerStatus) -> None:
        if status.state == "failed":
            code = status.error.code if status.error is not None else "unknown"
            began = "serving" if status.worker in self._view.was_ready else "starting"
            self._counts[status.function, began, code] += 1

    def families(self) -> list[MetricFamily]:
        family = MetricFamily("fleetstart_worker_failures_total", "counter", "Workers that failed, by error code.")
        for name in {name for name, _, _ in self._counts} - self._view.functions.keys():
            for key in [key for key in self._counts if key[0] == name]:
                del self._counts[key]
        for (name, began, code), count in sorted(self._counts.items()):
            family.add(count, function=name, when=began, code=code)
        return [family]
