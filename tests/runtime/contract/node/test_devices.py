"""Device requests and declarations: what is written is what is meant, and all else is refused by name."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.devices import (
    REQUEST_MAX,
    SHARE_MIN_BYTES,
    Device,
    DeviceId,
    DeviceReport,
    DeviceRequest,
    canonical_type,
    cpu_devices,
    parse_declared,
    parse_request,
)
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.record_decoder import RecordDecoder
from fleetstart.runtime.contract.sizes import GIB

TYPES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,31}", fullmatch=True).map(canonical_type)
REQUESTS = st.builds(DeviceRequest, count=st.integers(1, REQUEST_MAX), type=TYPES | st.just("")) | st.builds(
    DeviceRequest, type=TYPES | st.just(""), memory_bytes=st.integers(SHARE_MIN_BYTES, 1 << 44)
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (1, DeviceRequest()),
        ("1", DeviceRequest()),
        (2, DeviceRequest(count=2)),
        ("H100", DeviceRequest(type="H100")),
        ("h100:2", DeviceRequest(type="H100", count=2)),
        ("24GiB", DeviceRequest(memory_bytes=24 * GIB)),
        ("24G", DeviceRequest(memory_bytes=24 * GIB)),
        ("H200:24GiB", DeviceRequest(type="H200", memory_bytes=24 * GIB)),
        ("cpu", DeviceRequest(type="cpu")),
        ("CPU:1GiB", DeviceRequest(type="cpu", memory_bytes=GIB)),
        ("RTX-4090", DeviceRequest(type="RTX-4090")),
    ],
)
def test_a_request_means_what_is_written(written: object, meant: DeviceRequest) -> None:
    assert parse_request(written) == meant


@pytest.mark.parametrize(
    "written",
    [
        *(0, -1, 17, True, None, 1.5, [], "", " ", ":", ":2", "H100:", "H100:0", "H100:x", "H100:2:3", "24", "99999"),
        *("H 100", "24GB5", "1MiB", "H100:24", "-1", "1.5", "0GiB", "é", "1" * 400 + "GiB"),
    ],
)
def test_a_malformed_request_is_refused_by_name(written: object) -> None:
    with pytest.raises(InvalidSpec, match="gpu: ") as caught:
        parse_request(written)
    assert caught.value.hint


@given(REQUESTS)
def test_a_request_reads_back_as_it_is_shown_and_stored(request: DeviceRequest) -> None:
    assert parse_request(str(request)) == request
    assert msgspec.json.decode(msgspec.json.encode(request), type=DeviceRequest) == request


@given(st.text() | st.integers() | st.floats() | st.binary())
def test_whatever_is_written_is_a_request_or_refused(written: object) -> None:
    try:
        request = parse_request(written)
    except InvalidSpec:
        return
    assert parse_request(str(request)) == request


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(SHARE_MIN_BYTES, 1 << 40)), max_size=8))
def test_declared_devices_are_those_that_are_written(parts: list[tuple[int, int]]) -> None:
    assert parse_declared(", ".join(f"cpu:{count}x{size}" for count, size in parts)) == tuple(
        size for count, size in parts for _ in range(count)
    )


@given(st.text())
def test_a_declaration_is_understood_or_refused(text: str) -> None:
    with suppress(InvalidSpec):
        assert all(size >= SHARE_MIN_BYTES for size in parse_declared(text))


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:2", "cpu:0x4GiB", "cuda:1x4GiB", "cpu:2x", "cpu:65x1GiB", "none,cpu:1x1GiB"]
)
def test_a_malformed_declaration_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="devices"):
        parse_declared(text)


@given(
    st.lists(st.integers(SHARE_MIN_BYTES, 1 << 40), min_size=1, max_size=9).map(tuple),
    st.sets(st.integers(0, 127), min_size=1, max_size=32).map(lambda found: tuple(sorted(found))),
)
def test_cores_are_split_among_cpu_devices(sizes: tuple[int, ...], cores: tuple[int, ...]) -> None:
    devices = cpu_devices(sizes, cores)
    assert tuple(device.memory_bytes for device in devices) == sizes
    assert len({device.id for device in devices}) == len(sizes)
    assert all(device.cores for device in devices)
    if len(cores) >= len(sizes):
        assert sum((device.cores for device in devices), ()) == cores
        assert max(len(device.cores) for device in devices) - min(len(device.cores) for device in devices) <= 1


def test_a_share_suits_any_device_that_is_large_enough_and_of_its_type() -> None:
    device = Device(id=DeviceId("cuda:0"), kind="cuda", type="H100", memory_bytes=80 * GIB)
    assert parse_request("24GiB").suits(device)
    assert parse_request("H100:80GiB").suits(device)
    assert not parse_request("H200").suits(device)
    assert not parse_request("81GiB").suits(device)
    assert parse_request(1).bytes_on(device) == 80 * GIB
    assert parse_request("24GiB").bytes_on(device) == 24 * GIB


def test_records_of_another_release_are_read() -> None:
    report = NodeReport(node=NodeId("a"), epoch="e", address="x", cpus=1, memory_bytes=1, memory_used_bytes=0)
    earlier = msgspec.to_builtins(report)
    del earlier["devices"]
    assert RecordDecoder(NodeReport).decode(msgspec.json.encode(earlier)) == report
    later = {"id": "cpu:0", "kind": "cpu", "type": "cpu", "memory_bytes": 5, "colour": "blue"}
    read = RecordDecoder(NodeReport).decode(msgspec.json.encode({**earlier, "devices": [later]}))
    assert read.devices == (DeviceReport(id=DeviceId("cpu:0"), kind="cpu", type="cpu", memory_bytes=5),)
