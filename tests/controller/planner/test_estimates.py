"""What starts and calls teach."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetstart.controller.planner.estimates import (
    CALIBRATING,
    NodeMeasures,
    StartObservation,
    VersionMeasures,
    fleet_measures,
    is_calibrated,
    node_prior,
    observe_generation,
    observe_outcome,
    observe_start_of_version,
    observe_start_on_node,
    slowness,
    start_observation,
    version_prior,
    with_fleet_measures,
)
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.timeline import Timeline

MS = 1_000_000


def timeline(**phases: tuple[int, int]) -> Timeline:
    found = Timeline(origin_unix_ns=0)
    for name, (begin, end) in phases.items():
        found.add("import" if name == "imports" else name, begin * MS, end * MS)  # type: ignore[arg-type]
    return found


def test_a_cold_start_tells_bandwidth_and_a_warm_one_how_long_building_takes() -> None:
    phases = timeline(start=(0, 20), fetch=(0, 1000), device=(20, 120), imports=(20, 50), load=(50, 1010))
    cold = start_observation(phases, warm=False, fetch_bytes=100_000_000, sharers=2)
    assert cold == StartObservation(
        start_s=0.02, device_s=0.1, library_s=None, fetch_s=1.0, fetch_bytes=100_000_000, sharers=2
    )  # fmt: skip
    node = observe_start_on_node(NodeMeasures(), cold)
    assert node.store_bytes_per_s == MovingAverage(200e6, 1), "it had half of the link"
    assert (node.start_s, node.device_s, node.disk_bytes_per_s.count) == (
        MovingAverage(0.02, 1),
        MovingAverage(0.1, 1),
        0,
    )
    warm = start_observation(timeline(start=(0, 20), imports=(20, 50), load=(50, 90)), warm=True)
    assert warm.library_s == pytest.approx(0.07)
    assert warm.fetch_s is None
    assert observe_start_of_version(VersionMeasures(), warm).library_s.value == pytest.approx(0.07)
    assert observe_start_on_node(node, warm).store_bytes_per_s == node.store_bytes_per_s


def test_a_small_fetch_and_one_from_disk_tell_nothing_of_the_store() -> None:
    small = StartObservation(fetch_s=0.1, fetch_bytes=1000)
    assert observe_start_on_node(NodeMeasures(), small) == NodeMeasures()
    disk = observe_start_on_node(NodeMeasures(), StartObservation(fetch_s=0.1, fetch_bytes=100_000_000, source="disk"))
    assert (disk.disk_bytes_per_s.value, disk.store_bytes_per_s.count) == (1e9, 0)


def test_whole_workers_teach_what_the_model_takes_and_pipelines_what_a_hop_takes() -> None:
    known = observe_generation(VersionMeasures(), prefill_s=0.4, decode_s=0.05, call_s=3)
    assert (known.prefill_s.value, known.decode_s.value, known.call_s.value) == (0.4, 0.05, 3)
    piped = observe_generation(known, prefill_s=9, decode_s=0.216, call_s=3, stages=4, work=4.0)
    assert piped.hop_s.value == pytest.approx(0.004)
    assert piped.prefill_s == known.prefill_s
    assert observe_generation(known, prefill_s=9, decode_s=None, call_s=3, stages=4).hop_s.count == 0


def test_times_from_devices_of_different_speed_teach_one_and_the_same_model() -> None:
    """A token of 1 GB: on devices of 10 and 40 GB/s, in whatever order, and then predicted on one of 20 GB/s."""
    known = VersionMeasures()
    for speed in (10e9, 40e9, 40e9, 10e9, 40e9):
        known = observe_generation(
            known, prefill_s=5e9 / speed, decode_s=1e9 / speed, call_s=1, device_bytes_per_s=speed
        )
        assert known.decode_s.value * slowness(known, 20e9) == pytest.approx(0.05)
        assert known.prefill_s.value * slowness(known, 20e9) == pytest.approx(0.25)


def test_times_without_a_known_device_are_taken_as_they_are() -> None:
    known = observe_generation(VersionMeasures(), prefill_s=0.4, decode_s=0.05, call_s=3, device_bytes_per_s=10e9)
    other = observe_generation(known, prefill_s=0.4, decode_s=0.05, call_s=3)
    assert slowness(other, 1e9) == 1.0
    assert (other.prefill_s.value, other.decode_s.value) == (0.4, 0.05)


def test_before_the_first_call_a_device_that_has_run_others_tells_what_a_token_takes() -> None:
    prior = version_prior(10**9)
    assert prior.decode_s.value * slowness(prior, 5e9) == pytest.approx(0.2)


def test_predictions_learn_their_bias_and_tell_their_error() -> None:
    known = VersionMeasures()
    for _ in range(20):
        predicted = 2.0 + known.rest_s.value
        known = observe_outcome(known, kind="alone", predicted_s=predicted, observed_s=2.2, hindsight_s=predicted)
    assert known.rest_s.value == pytest.approx(0.2, abs=0.01)
    assert known.ttft_error.value < 0.02
    stalled = observe_outcome(VersionMeasures(), kind="alone", predicted_s=1.0, observed_s=10.0, hindsight_s=1.0)
    assert stalled.rest_s.value <= 2.5, "a stall is not a habit"
    assert stalled.ttft_error.value == pytest.approx(0.9)


def test_the_first_guesses_do_not_weigh_in_the_error_of_what_was_calibrated() -> None:
    known = VersionMeasures()
    for number, observed_s in enumerate((0.2, 1.9, 2.0, 2.0), start=1):
        known = observe_outcome(known, kind="alone", predicted_s=2.0, observed_s=observed_s, hindsight_s=None)
        assert known.ttft_error.count == number
        assert is_calibrated(known) == (number >= CALIBRATING)
    assert known.ttft_error.value < 0.05


def test_a_link_that_was_slower_than_known_is_no_bias() -> None:
    known = observe_outcome(VersionMeasures(), kind="alone", predicted_s=1.0, observed_s=4.0, hindsight_s=3.95)
    assert known.ttft_error.value == pytest.approx(0.75)
    assert known.rest_s.value == pytest.approx(0.06)
    unknown = observe_outcome(VersionMeasures(), kind="alone", predicted_s=1.0, observed_s=4.0, hindsight_s=None)
    assert (unknown.rest_s, unknown.ttft_error) == (VersionMeasures().rest_s, known.ttft_error)


def test_what_a_start_took_over_its_prediction_is_kept_for_margins_but_not_what_its_promise_allowed() -> None:
    late: dict[str, Any] = {"predicted_s": 1.0, "observed_s": 2.0, "hindsight_s": 1.8}
    assert observe_outcome(VersionMeasures(), kind="group", **late).ttft_ratios == {"group": [2.0]}
    shared = observe_outcome(VersionMeasures(), kind="group", shared=True, **late)
    assert shared.ttft_ratios["group"] == [pytest.approx(1.2)]
    assert shared.ttft_error.value == pytest.approx(0.5)


def test_before_whole_workers_have_told_a_pipelines_calls_are_a_guess_at_the_model() -> None:
    guess = observe_generation(VersionMeasures(), prefill_s=9, decode_s=0.108, call_s=3, stages=4)
    assert guess.decode_s.value == pytest.approx(0.1)
    assert (guess.decode_s.count, guess.hop_s.count) == (0, 0)
    known = observe_generation(guess, prefill_s=0.4, decode_s=0.05, call_s=3)
    assert known.decode_s == MovingAverage(0.05, 1), "a guess is replaced"


def test_a_version_without_measures_has_the_clusters_hops_and_rest() -> None:
    known = [
        VersionMeasures(hop_s=MovingAverage(hop_s, 1), rest_s=MovingAverage(0.3, 1)) for hop_s in (0.01, 0.02, 0.9)
    ]
    others = fleet_measures([*known, VersionMeasures()])
    new = with_fleet_measures(VersionMeasures(), others)
    assert (new.hop_s, new.rest_s) == (MovingAverage(0.02), MovingAverage(0.3))
    assert with_fleet_measures(known[0], others) == known[0]
    assert with_fleet_measures(VersionMeasures(), fleet_measures([])) == VersionMeasures()


def test_priors_come_from_neighbours_and_from_size() -> None:
    slow, quick = (NodeMeasures(store_bytes_per_s=MovingAverage(rate, 4)) for rate in (1e8, 3e8))
    assert node_prior([slow, quick, quick]).store_bytes_per_s == MovingAverage(3e8)
    assert node_prior([NodeMeasures()]) == NodeMeasures()
    assert version_prior(10**10).decode_s.value > version_prior(10**8).decode_s.value


@pytest.mark.parametrize(
    "measures", [NodeMeasures(start_s=MovingAverage(1, 2)), VersionMeasures(call_s=MovingAverage(1, 2))]
)
def test_they_survive_redis(measures: NodeMeasures | VersionMeasures) -> None:
    assert msgspec.json.decode(msgspec.json.encode(measures), type=type(measures)) == measures
