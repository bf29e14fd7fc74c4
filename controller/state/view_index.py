"""Dictionaries of the view that tell of their changes and find their values by group, and the record of changes.

A controller knows thousands of functions and workers, and a few of them change in a second: what follows from the view
is brought up to date by what has changed, and not computed from all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from fleetstart.runtime.contract.ids import FunctionName, NodeId

from .records import VersionKey

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False, weakref_slot=True)
class Changes:
    """Changes of the view since its reader last took them."""

    versions: set[VersionKey] = field(default_factory=set)
    """Versions with other records, orders, statuses, loads or failures, or whose node's lease is another."""
    nodes: set[NodeId] = field(default_factory=set)
    """Nodes with other reports, orders or statuses, and those that came or went."""
    functions: set[FunctionName] = field(default_factory=set)
    """Functions whose record, or a version of it, is new."""

    def take_functions(self) -> set[FunctionName]:
        taken, self.functions = self.functions, set()
        return taken

    def take_versions(self) -> set[VersionKey]:
        taken, self.versions = self.versions, set()
        return taken

    def take_nodes(self) -> set[NodeId]:
        taken, self.nodes = self.nodes, set()
        return taken


class WatchedDict(dict[Key, Value], Generic[Key, Value]):
    """A dict that tells of each value that is set or removed."""

    def __init__(self, changed: Callable[[Key, Value | None, Value | None], None]) -> None:
        """`changed(key, before, after)`: None for no value."""
        super().__init__()
        self._changed = changed

    def __setitem__(self, key: Key, value: Value) -> None:
        before = self.get(key)
        if before is value:
            return
        super().__setitem__(key, value)
        self._changed(key, before, value)

    def __delitem__(self, key: Key) -> None:
        before = self[key]
        super().__delitem__(key)
        self._changed(key, before, None)

    def pop(self, key: Key, default: Any = None) -> Any:
        if key not in self:
            return default
        value = self[key]
        del self[key]
        return value

    def become(self, values: Mapping[Key, Value]) -> None:
        """Takes over the values of another dict; those that are equal stay."""
        for gone in self.keys() - values.keys():
            del self[gone]
        for key, value in values.items():
            known = self.get(key)
            if known is not value and known != value:
                self[key] = value


class Groups(Generic[Key, Value]):
    """The values of a dict by what they have in common."""

    def __init__(self, group: Callable[[Value], Hashable]) -> None:
        self._group = group
        self._members: dict[Hashable, dict[Key, Value]] = {}

    def note(self, key: Key, before: Value | None, after: Value | None) -> None:
        """Brings the groups up to date with a change."""
        if before is not None:
            old = self._group(before)
            members = self._members[old]
            del members[key]
            if not members:
                del self._members[old]
        if after is not None:
            self._members.setdefault(self._group(after), {})[key] = after

    def of(self, group: Hashable) -> Mapping[Key, Value]:
        return self._members.get(group, _NOTHING)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._members)
