"""Bounds of tests excuse the time in which the machine had too few cores, and no more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import stopwatch
from tests.servers import wait_until


@pytest.fixture
def pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpu"
    monkeypatch.setattr(stopwatch, "PRESSURE", path)
    return path


def write(path: Path, waited_s: float) -> None:
    path.write_text(f"some avg10=1.00 avg60=2.00 avg300=3.00 total={waited_s * 1e6:.0f}\nfull avg10=0.00 total=7\n")


def test_time_without_cores_is_excused_up_to_a_share(pressure: Path) -> None:
    write(pressure, 5.0)
    watch = stopwatch.Stopwatch()
    time.sleep(0.02)
    assert watch.unhindered_s >= 0.02
    write(pressure, 5.015)
    assert watch.unhindered_s < watch.elapsed_s - 0.0149
    write(pressure, 99.0)
    assert watch.unhindered_s >= 0.02 * (1 - stopwatch.EXCUSED_SHARE)


def test_a_kernel_that_counts_nothing_excuses_nothing(pressure: Path) -> None:
    watch = stopwatch.Stopwatch()
    before_s = watch.elapsed_s
    assert watch.unhindered_s >= before_s


def test_what_never_comes_is_given_up_however_busy_the_machine_is(pressure: Path) -> None:
    write(pressure, 0.0)
    asked: list[int] = []

    def look() -> bool:
        asked.append(1)
        write(pressure, 100.0 * len(asked))
        return False

    watch = stopwatch.Stopwatch()
    with pytest.raises(AssertionError, match="the end of the world still False"):
        wait_until(look, 0.05, what="the end of the world")
    assert watch.elapsed_s >= 0.2
