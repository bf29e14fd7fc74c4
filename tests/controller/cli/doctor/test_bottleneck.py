"""Which limit a slow load is hitting: tables of ceilings and of what loads reached."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.controller.cli.doctor.bottleneck import ObservedLoads, diagnose, format_rate
from fleetstart.controller.cli.doctor.checks import Finding
from fleetstart.runtime.contract.node.throughput import Ceilings

GB = 1e9
FAST: dict[Any, float] = {"disk": 3 * GB, "store": 1 * GB, "checksum": 12 * GB, "prefault": 20 * GB, "device": 50 * GB}


def one(
    source: str, reached_gb: float, *, remote: bool = True, pages: str = "thp", here: Any = "thp", **ceilings_gb: float
) -> Finding:
    limits: dict[Any, float] = FAST | {limit: amount * GB for limit, amount in ceilings_gb.items()}
    (finding,) = diagnose(
        Ceilings(pages=here, bytes_per_s=limits),
        ObservedLoads(node="node-1", pages=pages, bytes_per_s={source: reached_gb * GB}),
        remote_store=remote,
    )
    return finding


@pytest.mark.parametrize(
    ("finding", "said", "advice"),
    [
        # As fast as their source.
        (
            one("store", 0.96),
            "0.96 GB/s, 96% of the rate measured now (1.00 GB/s): the network or the store",
            "DISK_CACHE",
        ),
        (
            one("store", 2.9, remote=False, store=3.0),
            "97% of the rate measured now (3.00 GB/s): the disk is the limit",
            "",
        ),
        (one("disk", 2.4), "80% of the rate measured now (3.00 GB/s): the disk is the limit", ""),
        (one("disk", 1.4, pages="small", here="small", disk=1.5), "the limit, and memory for weights has 4", "huge"),
        # Faster than it can give: no reading from there at all.
        (one("store", 8.0, remote=False, store=3.0), "267% of the rate measured now (3.00 GB/s): a cache helped", ""),
    ],
)
def test_what_runs_at_its_ceiling_is_well(finding: Finding, said: str, advice: str) -> None:
    assert finding.verdict == "ok"
    assert said in finding.found
    assert advice in finding.advice
    assert bool(advice) == bool(finding.advice)


@pytest.mark.parametrize(
    ("finding", "said", "advice"),
    [
        # Memory is made and then read into: 3 and 1 GB/s, one after the other, are 0.75.
        (
            one("disk", 0.7, prefault=1),
            "memory allocation is the limit: it runs at 1.00 GB/s, which allows 0.75 GB/s",
            "FS_POOL_MEMORY",
        ),
        (one("disk", 0.2, prefault=0.26), "memory allocation is the limit: it runs at 0.26 GB/s", "FS_POOL_MEMORY"),
        (one("store", 0.2, prefault=0.26), "memory allocation is the limit", "FS_POOL_MEMORY"),
        (one("disk", 1.4, checksum=1.5), "the cores are the limit: together they checksum 1.50 GB/s", "cores"),
        # Of two that are near, the nearer one.
        (one("disk", 1.4, checksum=1.5, prefault=3.5), "the cores are the limit", "cores"),
        # A limit that loads do not come near does not explain them, nor does one that lies above the source's.
        (one("disk", 0.3, prefault=1), "no limit is near", "load again"),
        (one("disk", 2.2, prefault=20), "no limit is near", "load again"),
        (one("disk", 1.2, pages="small"), "40% of the rate measured now (3.00 GB/s): the node's memory", "restart it"),
        (one("disk", 1.2, pages="small", here="small"), "no limit is near", "load again"),
        (one("store", 0.25), "25% of the rate measured now (1.00 GB/s): no limit is near", "FS_FETCH_THREADS"),
        (one("store", 0.25, remote=False), "no limit is near", "load again"),
    ],
)
def test_what_runs_below_its_ceiling_gets_a_reason_and_advice(finding: Finding, said: str, advice: str) -> None:
    assert finding.verdict == "warn"
    assert said in finding.found
    assert advice in finding.advice


def test_each_source_has_its_finding_and_unknown_ones_none() -> None:
    observed = ObservedLoads(node="n", pages="thp", bytes_per_s={"store": 0.9 * GB, "disk": 2.9 * GB, "peer": GB})
    findings = diagnose(Ceilings(pages="thp", bytes_per_s=FAST), observed, remote_store=True)
    assert [finding.numbers for finding in findings] == [
        {"bytes_per_s": 0.9 * GB, "share": 0.9},
        {"bytes_per_s": 2.9 * GB, "share": 2.9 / 3},
    ]


def test_without_a_ceiling_it_says_why_there_is_none() -> None:
    observed = ObservedLoads(node="n", pages="thp", bytes_per_s={"store": GB})
    ceilings = Ceilings(pages="thp", failed={"store": "s3://b does not give it"})
    (finding,) = diagnose(ceilings, observed, remote_store=True)
    assert finding.verdict == "ok"
    assert finding.found.endswith("nothing to compare: s3://b does not give it")
    assert finding.numbers == {"bytes_per_s": GB}


@pytest.mark.parametrize(
    ("bytes_per_s", "shown"),
    [
        (3.1234e9, "3.12 GB/s"),
        (0.1e9, "0.10 GB/s"),
        (11.25e6, "0.0112 GB/s"),
        (140e9, "140.0 GB/s"),
        (0, "0.0000 GB/s"),
    ],
)
def test_rates_have_digits_to_compare(bytes_per_s: float, shown: str) -> None:
    assert format_rate(bytes_per_s) == shown
