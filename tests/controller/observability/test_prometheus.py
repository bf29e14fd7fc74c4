"""The Prometheus text format: the client library's parser reads what is written, whatever the labels are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fleetstart.controller.observability.prometheus import Histogram, MetricFamily, render

VALUES = st.floats(allow_nan=False) | st.integers(-(1 << 60), 1 << 60)
LABELS = st.dictionaries(st.sampled_from(["function", "code", "when"]), st.text(max_size=20), max_size=3)


@pytest.mark.slow
@given(samples=st.lists(st.tuples(LABELS, VALUES), max_size=8), text=st.text(max_size=40))
def test_samples_are_read_as_they_were_written(samples: list[tuple[dict[str, str], float]], text: str) -> None:
    family = MetricFamily("fs_things", "gauge", text)
    for labels, value in samples:
        family.add(value, **labels)
    found = [
        (sample.labels, sample.value)
        for read in text_string_to_metric_families(render([family]).decode())
        for sample in read.samples
    ]
    assert found == [(labels, float(value)) for labels, value in samples]


@given(seen=st.lists(st.floats(0, 1e6)))
def test_a_histogram_counts_each_observation_once_and_its_buckets_grow(seen: list[float]) -> None:
    histogram = Histogram((0.01, 0.1, 1, 10))
    for value in seen:
        histogram.observe(value)
    family = MetricFamily("fs_seconds", "histogram", "x")
    family.add_histogram(histogram, phase="load")
    (read,) = text_string_to_metric_families(render([family]).decode())
    buckets = {float(s.labels["le"]): s.value for s in read.samples if s.name == "fs_seconds_bucket"}
    assert buckets == {bound: sum(value <= bound for value in seen) for bound in (0.01, 0.1, 1.0, 10.0, math.inf)}
    sums = {sample.name: sample.value for sample in read.samples if sample.name != "fs_seconds_bucket"}
    assert sums["fs_seconds_count"] == len(seen)
    assert math.isclose(sums["fs_seconds_sum"], sum(seen), abs_tol=1e-9)


def test_a_family_without_samples_is_left_out() -> None:
    assert render([MetricFamily("fs_none", "counter", "nothing")]) == b""
