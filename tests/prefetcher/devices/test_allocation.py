"""Reservations and rates of a node's devices."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.devices.allocation import DeviceAllocator, open_devices
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.devices import Device, DeviceId, DeviceShare, cpu_devices
from fleetstart.runtime.contract.node.messages import DeviceBinding, DeviceLoaded
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.sizes import GIB

CPU0, CPU1, GPU = DeviceId("cpu:0"), DeviceId("cpu:1"), DeviceId("cuda:0")
DEVICES = (
    *cpu_devices((4 * GIB, 2 * GIB), (0, 1, 2, 3)),
    Device(id=GPU, kind="cuda", type="H100", memory_bytes=80 * GIB, uuid="GPU-1"),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]).map(WorkerId),
        st.none()
        | st.lists(
            st.builds(DeviceShare, st.sampled_from([CPU0, CPU1, GPU, DeviceId("x")]), st.integers(-1, 90 * GIB)),
            max_size=3,
        ),
    ),
    max_size=40,
)


@given(STEPS)
def test_reservations_never_exceed_a_device_and_end_with_their_workers(
    steps: list[tuple[WorkerId, list[DeviceShare] | None]],
) -> None:
    node = DeviceAllocator(DEVICES)
    held: dict[WorkerId, list[DeviceShare]] = {}
    for worker, shares in steps:
        if shares is None:
            node.release(worker)
            held.pop(worker, None)
        elif worker not in held:
            with suppress(Unavailable):
                node.reserve(worker, shares)
                held[worker] = shares
        for report in node.reports():
            own = sum(share.memory_bytes for shares in held.values() for share in shares if share.id == report.id)
            assert report.reserved_bytes == own <= report.memory_bytes


def test_a_refused_reservation_names_the_device_and_reserves_nothing() -> None:
    node = DeviceAllocator(DEVICES)
    node.reserve(WorkerId("a"), [DeviceShare(CPU1, GIB)])
    with pytest.raises(Unavailable, match="device cpu:1 has 1024 of 2048 MiB free, the worker needs 2048 MiB"):
        node.reserve(WorkerId("b"), [DeviceShare(CPU0, GIB), DeviceShare(CPU1, 2 * GIB)])
    assert node.reserved_bytes(CPU0) == 0
    node.release(WorkerId("a"))
    node.reserve(WorkerId("b"), [DeviceShare(CPU0, GIB), DeviceShare(CPU1, 2 * GIB)])


def test_a_process_is_bound_to_its_own_devices() -> None:
    node = DeviceAllocator(DEVICES)
    assert node.binding([DeviceShare(CPU1, GIB)]) == DeviceBinding(devices=(CPU1,), cores=(2, 3), cores_of=((2, 3),))
    assert node.binding([DeviceShare(CPU0, GIB), DeviceShare(CPU1, GIB)]) == DeviceBinding(
        devices=(CPU0, CPU1), cores=(0, 1, 2, 3), cores_of=((0, 1), (2, 3))
    )
    assert node.binding([DeviceShare(GPU, 20 * GIB)]) == DeviceBinding(
        devices=(GPU,), visible="GPU-1", fractions=(0.25,), files=("",), cores_of=((),)
    )
    assert node.binding([]) == DeviceBinding()
    assert DeviceAllocator(()).binding([]) is None


@given(
    rate=st.floats(1e8, 1e11),
    noise=st.lists(st.floats(0.9, 1.1), min_size=30, max_size=60),
    first=st.floats(1e7, 1e12),
    size=st.integers(16 << 20, 1 << 36),
)
def test_the_rate_of_loads_converges_whatever_the_first_one_was(
    rate: float, noise: list[float], first: float, size: int
) -> None:
    node, worker = DeviceAllocator(DEVICES), WorkerId("a")
    node.reserve(worker, [DeviceShare(GPU, GIB)])
    for factor in [first / rate, *noise]:
        node.loaded(worker, DeviceLoaded(size_bytes=size, busy_ns=round(size / (rate * factor) * 1e9) or 1))
    report = next(report for report in node.reports() if report.id == GPU)
    bound = 0.11 + abs(first / rate - 1) * 0.8 ** (len(noise) - 1)
    assert report.load_bytes_per_s == pytest.approx(rate, rel=bound)
    others = [report.load_bytes_per_s for report in node.reports() if report.id != GPU]
    assert others == [0.0, 0.0]


def spoken(decode_s: float | None, stages: int = 1) -> Speed:
    return Speed(calls=1, call_s=1.0, prefill_s=0.1, decode_s=decode_s, stages=stages)


def test_the_compute_speed_of_devices_is_learned_from_the_steps_of_their_workers() -> None:
    node, worker = DeviceAllocator(DEVICES), WorkerId("a")
    node.reserve(worker, [DeviceShare(CPU0, GIB), DeviceShare(CPU1, GIB)])
    said = node.stepped(worker, spoken(0.1), 2 * GIB)
    assert said.device_bytes_per_s == pytest.approx(20 * GIB)
    assert said.decode_s == 0.1
    speeds = {report.id: report.decode_bytes_per_s for report in node.reports()}
    assert speeds == {CPU0: pytest.approx(10 * GIB), CPU1: pytest.approx(10 * GIB), GPU: 0.0}
    for _ in range(40):
        node.stepped(worker, spoken(0.2), 2 * GIB)
    (learned,) = [report.decode_bytes_per_s for report in node.reports() if report.id == CPU0]
    assert learned == pytest.approx(5 * GIB, rel=0.01)


def test_steps_that_measure_nothing_are_not_learned() -> None:
    node, worker = DeviceAllocator(DEVICES), WorkerId("a")
    assert node.stepped(worker, spoken(0.1), GIB).device_bytes_per_s == 0.0  # has no device
    node.reserve(worker, [DeviceShare(GPU, GIB)])
    for speed, weight_bytes in (
        (spoken(None), GIB),
        (spoken(0.0), GIB),
        (spoken(0.1, stages=2), GIB),
        (spoken(0.1), 0),
    ):
        assert node.stepped(worker, speed, weight_bytes).device_bytes_per_s == 0.0
    assert all(report.decode_bytes_per_s == 0.0 for report in node.reports())


def test_a_load_that_measures_nothing_is_not_learned() -> None:
    node, worker = DeviceAllocator(DEVICES), WorkerId("a")
    node.loaded(worker, DeviceLoaded(size_bytes=GIB, busy_ns=1))  # has no device
    node.reserve(worker, [DeviceShare(GPU, GIB)])
    for size_bytes, busy_ns in ((0, 0), (GIB, 0), (GIB, -5), (1000, 1000), (-GIB, 5)):
        node.loaded(worker, DeviceLoaded(size_bytes=size_bytes, busy_ns=busy_ns))
    assert all(report.load_bytes_per_s == 0.0 for report in node.reports())


def test_a_node_without_a_declaration_and_without_gpus_has_no_devices() -> None:
    assert open_devices((), {}, gpus=False).devices == {}
    assert list(open_devices((GIB, GIB), {}, gpus=False).devices) == [CPU0, CPU1]
