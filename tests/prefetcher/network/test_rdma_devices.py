"""RDMA devices as the kernel lists them, on a folder of the same shape; a real one is in tests/rdma."""

from __future__ import annotations

from pathlib import Path

from fleetstart.prefetcher.network.rdma_devices import rdma_devices


def add_device(sysfs: Path, name: str, state: str) -> None:
    port = sysfs / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (sysfs / name / "fw_ver").write_text("16.35.4030\n")


def test_a_machine_without_rdma_has_no_device(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "none") == []
    assert rdma_devices(tmp_path) == []


def test_devices_are_described_and_those_that_are_down_say_why(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_1", "1: DOWN")
    add_device(tmp_path, "mlx5_0", "4: ACTIVE")
    (tmp_path / "odd").mkdir()
    up, down, odd = rdma_devices(tmp_path)
    assert (up.name, up.state, up.link, up.rate) == ("mlx5_0", "ACTIVE", "InfiniBand", "100 Gb/sec (4X EDR)")
    assert up.firmware == "16.35.4030"
    assert up.usable or "does not load" in up.problem
    assert (down.usable, down.problem) == (False, "its port is DOWN")
    assert (odd.state, odd.problem) == ("unknown", "its port is unknown")
