"""Lookups in the view for access control: a project's functions and their demand, an audited object's record."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.ids import FunctionName

from ..state.records import FunctionRecord
from ..state.traffic import scale_of
from ..state.view import View
from .quotas import ResourceDemand
from .route_rules import Kind


def functions_of(view: View, project: str) -> list[FunctionRecord]:
    return [record for record in view.functions.values() if project_of(record.name) == project]


def demands_of(view: View, project: str) -> list[ResourceDemand]:
    """The demand of each function of a project."""
    found = []
    for record in functions_of(view, project):
        version = view.live(record.name)
        if version is None:  # of another release, and not understood
            continue
        spec, workers = version.spec, scale_of(record, version.spec).max
        found.append(ResourceDemand(function=record.name, workers=workers, memory_bytes=workers * spec.memory_bytes))
    return found


def object_snapshot(view: View) -> Callable[[Kind, str], msgspec.Struct | None]:
    """Returns a lookup of records as they are now, whatever the view becomes. It gives None for what the view lacks."""
    functions, table = dict(view.functions), view.access

    def seen(kind: Kind, name: str) -> msgspec.Struct | None:
        if kind == "function":
            return functions.get(FunctionName(name))
        if kind == "key":
            return table.keys.get(name)
        if kind == "project":
            return table.projects.get(name)
        if kind == "volume":
            return table.volumes.get(name)
        return table.secrets.get(name) if kind == "secret" else None

    return seen
