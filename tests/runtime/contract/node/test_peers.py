"""Grants: secrets are bound to every field and to the holder's key, proofs to the nonces of one connection."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.peers import Grant, grant_proof, grant_secret

GRANT = Grant(
    checkpoint=CheckpointId("c" * 64), holder=NodeId("a"), epoch="e1", reader=NodeId("b"), expires_unix_ms=1_000
)
KEY = b"k" * 32


@pytest.mark.parametrize(
    ("field", "other"),
    [("checkpoint", "d" * 64), ("holder", "b"), ("epoch", "e2"), ("reader", "c"), ("expires_unix_ms", 1_001)],
)
def test_a_grant_with_another_field_has_another_secret(field: str, other: object) -> None:
    assert grant_secret(msgspec.structs.replace(GRANT, **{field: other}), KEY) != grant_secret(GRANT, KEY)


def test_another_holders_key_makes_another_secret() -> None:
    assert grant_secret(GRANT, b"l" * 32) != grant_secret(GRANT, KEY)


def test_a_grant_that_was_sent_has_the_same_secret() -> None:
    again = msgspec.json.decode(msgspec.json.encode(GRANT), type=Grant)
    assert grant_secret(again, KEY) == grant_secret(GRANT, KEY)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_proof_is_of_its_connection_alone(holder: bytes, reader: bytes) -> None:
    secret = grant_secret(GRANT, KEY)
    proof = grant_proof(secret, holder, reader)
    assert len(proof) == 32
    assert proof == grant_proof(secret, holder, reader)
    if holder != reader:
        assert proof != grant_proof(secret, reader, holder)
