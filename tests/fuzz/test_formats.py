"""Short fuzz of each format, a few thousand mutations in every run; `fuzz_formats` goes on for as long as one likes."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.cli.weights.source_layout import ShardHeader, ShardLayout
from fleetstart.runtime.contract.weights.manifest import manifest_bytes
from tests.fuzz.formats import (
    HEADER_DATA_BYTES,
    check_adapter,
    check_header_text,
    check_layout,
    check_manifest,
    mutated,
    replaced,
    sound_header,
    sound_manifest,
)
from tests.fuzz.fuzz_formats import TARGETS, WORDS

SEEDS = st.integers(0, 1 << 32)
RUNS = settings(derandomize=True, max_examples=400, deadline=None)
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        -1,
        0,
        1,
        7,
        1.5,
        True,
        None,
        "",
        "x",
        "../x",
        "F4",
        "F64",
        "\0",
        [],
        {},
        [[]],
        [-1],
        [1, 1, 1],
        1 << 63,
        1 << 64,
        10**300,
    ]
)
HUGE = [[10**4000, 10**4000], 10**4000, -(10**4000), [10**30] * 64]
"""Numbers that Python refuses to write out, alone or multiplied."""


@pytest.mark.parametrize("target", TARGETS)
def test_what_targets_begin_with_is_sound(target: str) -> None:
    check, sound = TARGETS[target]
    assert check(sound)


@pytest.mark.parametrize("target", TARGETS)
@given(SEEDS)
@RUNS
def test_no_change_of_bytes_makes_a_reader_fail_otherwise(target: str, seed: int) -> None:
    chance = random.Random(seed)
    check, sound = TARGETS[target]
    check(mutated(sound, chance, 1 + chance.randrange(5), WORDS))


@given(SEEDS, VALUES)
@RUNS
def test_no_value_anywhere_makes_a_reader_fail_otherwise(seed: int, value: Any) -> None:
    for check, sound in (
        (check_header_text, sound_header()[8:-HEADER_DATA_BYTES]),
        (check_manifest, manifest_bytes(sound_manifest())),
        (check_adapter, TARGETS["adapter"][1]),
    ):
        changed = replaced(json.loads(sound), random.Random(seed), value)
        check(json.dumps(changed).encode())


@pytest.mark.parametrize("value", HUGE, ids=["shape", "number", "negative", "dimensions"])
def test_numbers_that_cannot_be_written_out_are_refused_like_others(value: Any) -> None:
    for seed in range(200):
        for check, sound in (
            (check_header_text, sound_header()[8:-HEADER_DATA_BYTES]),
            (check_manifest, manifest_bytes(sound_manifest())),
        ):
            changed = replaced(json.loads(sound), random.Random(seed), value)
            check(json.dumps(changed).encode())


@pytest.mark.slow
@given(SEEDS)
@RUNS
def test_no_layout_makes_its_reader_fail_otherwise(seed: int) -> None:
    """A layout comes from the store, and nothing but its fitting the manifest vouches for it."""
    chance = random.Random(seed)
    table = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, dtype, shape, begin, end in [
            ("a", "F32", [8], 0, 32), ("b", "U8", [10, 10], 32, 132),
            ("c", "F16", [128], 132, 388), ("d", "F32", [8], 388, 420),
        ]
    }  # fmt: skip
    data = msgspec.json.encode(ShardLayout(files=[ShardHeader("model.safetensors", json.dumps(table))]))
    assert check_layout(gzip.compress(data))
    check_layout(gzip.compress(mutated(data, chance, 1 + chance.randrange(4))))
    check_layout(mutated(gzip.compress(data), chance, 1))
