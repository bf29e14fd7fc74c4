"""Records of another release: unknown fields are ignored at any depth, what is broken is one kind of error."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.state.access_records import ProjectRecord, Quotas
from fleetstart.controller.state.records import FunctionRecord, ScaleOverride
from fleetstart.runtime.contract.billing.ledger import LedgerRow
from fleetstart.runtime.contract.function.spec import SLO, FunctionSpec, LLMSettings, Scale
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.sizes import MIB

SPEC = FunctionSpec(
    name=FunctionName("f"),
    bundle=BundleId("0" * 64),
    entry="handler:run",
    weights=CheckpointId("1" * 64),
    llm=LLMSettings(kv_memory_bytes=MIB),
    slo=SLO(ttft_s=1.0),
    scale=Scale(min=1, max=2),
    env={"A": "1"},
)
ORDER = WorkerOrder(worker=WorkerId("w"), node="n", epoch="e", version=Version(1), spec=SPEC, ordered_unix_ns=5)  # type: ignore[arg-type]
FUNCTION = FunctionRecord(
    name=FunctionName("f"),
    live=Version(2),
    deployed_unix_ms=1,
    split={Version(1): 40, Version(2): 60},
    scaled=ScaleOverride(max=3),
)
PROJECT = ProjectRecord(name="p", quotas=Quotas(workers=1), created_unix_ms=1, created_by="a")
RECORDS: list[msgspec.Struct] = [SPEC, ORDER, FUNCTION, PROJECT]


def objects_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all objects whose names are fields, and not a user's."""
    if isinstance(value, list):
        return [found for i, entry in enumerate(value) for found in objects_in(entry, (*path, i))]
    if not isinstance(value, dict) or (path and path[-1] in ("adapters", "env", "tags", "split", "aliases")):
        return []
    return [path, *(found for name, entry in value.items() for found in objects_in(entry, (*path, name)))]


@given(st.sampled_from(RECORDS), st.data())
def test_a_field_of_a_later_release_is_ignored_wherever_it_is(record: msgspec.Struct, data: st.DataObject) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(record))
    for path in data.draw(st.lists(st.sampled_from(objects_in(plain)), min_size=1, max_size=3)):
        target = plain
        for step in path:
            target = target[step]
        target["of_a_later_release"] = data.draw(st.sampled_from([1, "x", None, [1], {"a": {"b": 2}}]))
    assert RecordDecoder(type(record)).decode(msgspec.json.encode(plain)) == record


def test_what_users_send_is_still_strict() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(msgspec.json.encode(SPEC)[:-1] + b',"memory_byte":1}', type=FunctionSpec)


@given(st.binary(max_size=200) | st.sampled_from([b"null", b"[]", b"1", b'"x"', b"{}", b"[" * 5000]))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    for kind in (FunctionSpec, WorkerOrder, FunctionRecord):
        with pytest.raises(UnreadableRecord):
            RecordDecoder(kind).decode(raw)


def test_a_struct_s_own_checks_and_unknown_values_make_it_unreadable() -> None:
    low = msgspec.json.encode(SPEC).replace(b'"max":2', b'"max":0')
    with pytest.raises(UnreadableRecord, match="scale"):
        RecordDecoder(FunctionSpec).decode(low)
    other = msgspec.json.encode(SPEC).replace(b'"isolation":"namespaces"', b'"isolation":"of a later release"')
    with pytest.raises(UnreadableRecord, match="isolation"):
        RecordDecoder(FunctionSpec).decode(other)


class Cat(msgspec.Struct, tag="cat", forbid_unknown_fields=True):
    lives: int


class Dog(msgspec.Struct, tag="dog", forbid_unknown_fields=True):
    name: Literal["rex"]


def test_unions_with_tags_keep_the_struct_that_the_tag_names() -> None:
    decoder: RecordDecoder[Any] = RecordDecoder(Cat | Dog)  # type: ignore[arg-type]
    assert decoder.decode(b'{"type":"dog","name":"rex","lives":9}') == Dog(name="rex")
    assert decoder.decode(b'{"type":"cat","name":"rex","lives":9}') == Cat(lives=9)
    with pytest.raises(UnreadableRecord):
        decoder.decode(b'{"type":"emu"}')
    with pytest.raises(UnreadableRecord):
        RecordDecoder(LedgerRow).decode(b'{"type":"emu"}')  # type: ignore[arg-type]
