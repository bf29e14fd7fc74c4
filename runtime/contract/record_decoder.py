"""Decoding of records that another release may have written: fields that this one does not know are ignored.

Records of Redis are read by controllers and nodes of two releases while a system is upgraded. What users send is
stricter: structs such as `FunctionSpec` forbid unknown fields, so that a typo is an error. A record with unknown
fields therefore fails its first decoding, and is decoded a second time without them.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

Record = TypeVar("Record")


class UnreadableRecord(ValueError):
    """A record that cannot be decoded: broken, or of a kind that this release does not know."""


class RecordDecoder(Generic[Record]):
    """A decoder of one type of records. Raises nothing but `UnreadableRecord`, whatever the bytes are."""

    def __init__(self, kind: type[Record]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._shape: inspect.Type | None = None

    def decode(self, raw: bytes | bytearray | str) -> Record:
        try:
            return self._decoder.decode(raw)
        except Exception as error:  # checks of a struct raise errors of their own, which msgspec lets through
            first = error
        try:
            if self._shape is None:
                self._shape = inspect.type_info(self._kind)
            known = known_fields(msgspec.json.decode(raw), self._shape)
            # As JSON again: `convert` takes no numbers from the keys of an object.
            return self._decoder.decode(msgspec.json.encode(known))
        except Exception:
            raise UnreadableRecord(f"{type(first).__name__}: {first}") from first


def known_fields(value: Any, shape: inspect.Type) -> Any:
    """The value without the fields that its type does not have, at any depth."""
    if isinstance(shape, inspect.UnionType):
        return _of_union(value, shape)
    if isinstance(shape, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in shape.fields}
        tag = {shape.tag_field} if shape.tag_field is not None else set()
        return {
            name: known_fields(entry, fields[name]) if name in fields else entry
            for name, entry in value.items()
            if name in fields or name in tag
        }
    if isinstance(shape, inspect.DictType) and isinstance(value, dict):
        return {name: known_fields(entry, shape.value_type) for name, entry in value.items()}
    if isinstance(shape, inspect.ListType | inspect.VarTupleType | inspect.SetType) and isinstance(value, list):
        return [known_fields(entry, shape.item_type) for entry in value]
    return value


def _of_union(value: Any, shape: inspect.UnionType) -> Any:
    """A union has one kind of object, or several with tags; of these each is cut by its own tag's struct."""
    for kind in shape.types:
        if isinstance(value, dict) and isinstance(kind, inspect.StructType) and _has_tag(value, kind):
            return known_fields(value, kind)
        if isinstance(value, dict) and isinstance(kind, inspect.DictType):
            return known_fields(value, kind)
        if isinstance(value, list) and isinstance(kind, inspect.ListType | inspect.VarTupleType):
            return known_fields(value, kind)
    return value


def _has_tag(value: dict[str, Any], kind: inspect.StructType) -> bool:
    return kind.tag_field is None or value.get(kind.tag_field) == kind.tag
