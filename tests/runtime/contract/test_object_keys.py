"""Object keys: none leads out of the store, and callers may name bundles and checkpoints only."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.ids import BundleId, CheckpointId
from fleetstart.runtime.contract.object_keys import (
    CheckpointKey,
    bundle_key,
    checkpoint_key,
    is_digest,
    is_key,
    is_object_name,
    parse_key,
)

DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)
HOSTILE = st.lists(st.sampled_from(["..", ".", "", "a", "bundles", "checkpoints", "0" * 64, "\0"]), max_size=6).map(
    "/".join
)


@given(DIGESTS, NAMES)
def test_a_key_that_is_made_is_parsed_to_what_it_names(digest: str, name: str) -> None:
    assert parse_key(bundle_key(BundleId(digest))) == digest
    assert parse_key(checkpoint_key(CheckpointId(digest), name)) == CheckpointKey(CheckpointId(digest), name)


@given(st.text(max_size=80) | HOSTILE)
def test_what_callers_may_name_stays_in_the_store(key: str) -> None:
    if parse_key(key) is not None:
        assert is_key(key)


@given(st.text(max_size=80) | HOSTILE)
def test_no_key_leads_out_of_the_store(key: str) -> None:
    root = Path("/srv/store")
    inside = "\0" not in key and key not in ("", ".") and (root / key).is_relative_to(root)
    if is_key(key):
        assert inside
        assert ".." not in PurePosixPath(key).parts


@pytest.mark.parametrize("key", ["", "/", "/etc/passwd", "a//b", "a/../b", "..", "a/.", "a\0b", "a/"])
def test_keys_that_are_none(key: str) -> None:
    assert not is_key(key)


@pytest.mark.parametrize(
    "key",
    [
        f"bundles/{'A' * 64}",
        f"bundles/{'0' * 63}",
        f"bundles/{'0' * 64}/x",
        f"bundles/{'0' * 64}\n",
        "ledger/000000000001",
        f"checkpoints/{'0' * 64}",
        f"checkpoints/{'0' * 64}/",
        f"checkpoints/{'0' * 64}/../x",
        f"checkpoints/{'0' * 64}/a/b",
    ],
)
def test_other_keys_are_not_for_callers(key: str) -> None:
    assert parse_key(key) is None


def test_digests_and_names_are_matched_to_their_end() -> None:
    assert not is_digest("0" * 64 + "\n")
    assert not is_object_name("model\n")
