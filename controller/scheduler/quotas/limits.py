"""Limits of one reconciliation step by the projects' quotas: how many workers each version may have, and start now.

Pure. `shares` divides a quota among the versions of a project; here is what each of them has and wants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder
from fleetstart.runtime.contract.node.reports import FunctionLoad

from ...state.access_records import Quotas
from ...state.records import VersionKey, VersionRecord
from ...state.view import View
from ..worker_pool import Member
from .shares import QuotaRoom, VersionDemand, has_worker_quotas, quota_reached, share_quota


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedVersion:
    """One version as it was found in a step, and the workers that it wants."""

    key: VersionKey
    record: VersionRecord | None
    spec: FunctionSpec
    load: FunctionLoad
    orders: list[WorkerOrder]
    members: list[Member]
    needed: int
    desired: int

    @property
    def running(self) -> int:
        """Workers that are to run on."""
        return sum(member.wanted == "run" for member in self._present())

    @property
    def present(self) -> int:
        """All workers that have not ended, also those that drain; not those in standby, which have little memory."""
        return sum(member.wanted != "standby" for member in self._present())

    def _present(self) -> list[Member]:
        whole = [one for one in self.members if not one.helper or one.becomes_whole]
        return [one for one in whole if not one.lost and one.state not in FINAL]


class ProjectLimits:
    """Limits of the versions of a step by their projects' quotas. Projects without quotas cost nothing."""

    def __init__(self, view: View, observed: Sequence[ObservedVersion]) -> None:
        self._quotas: dict[str, Quotas] = {}
        self._granted: dict[VersionKey, int] = {}
        self._room: dict[str, QuotaRoom] = {}
        by_project: dict[str, list[ObservedVersion]] = defaultdict(list)
        limited = limited_projects(view)
        for one in observed if limited else ():
            if (project := project_of(one.key.name)) in limited:
                by_project[project].append(one)
        for project, versions in by_project.items():
            quotas = self._quotas[project] = limited[project]
            self._granted |= share_quota([_demand(one) for one in versions], quotas)
            room = self._room[project] = QuotaRoom.of(quotas)
            for one in versions:
                room.take(one.present, one.spec.memory_bytes)

    def granted(self, one: ObservedVersion) -> int:
        return self._granted.get(one.key, one.desired)

    def room_for(self, one: ObservedVersion, count: int) -> int:
        """How many of `count` new workers may start now, beside those that drain."""
        room = self._room.get(project_of(one.key.name))
        return count if room is None else room.fits(count, one.spec.memory_bytes)

    def started(self, one: ObservedVersion, count: int) -> None:
        room = self._room.get(project_of(one.key.name))
        if room is not None:
            room.take(count, one.spec.memory_bytes)

    def shortage(self, one: ObservedVersion) -> ErrorInfo | None:
        """The error of a version that needs a worker and is granted none; None if it has some or gets some."""
        if one.needed and not self.granted(one):
            project = project_of(one.key.name)
            return quota_reached(project, self._quotas[project], one.key)
        return None


def limited_projects(view: View) -> dict[str, Quotas]:
    """The projects with a quota of workers or memory."""
    return {name: one.quotas for name, one in view.access.projects.items() if has_worker_quotas(one.quotas)}


def _demand(one: ObservedVersion) -> VersionDemand:
    return VersionDemand(
        key=one.key,
        running=one.running,
        needed=one.needed,
        desired=one.desired,
        memory_bytes=one.spec.memory_bytes,
    )


def used_up(view: View, project: str, memory_bytes: int) -> str:
    """Says that one more worker of that memory is above the project's quota; "" if it is not."""
    record = view.access.projects.get(project)
    if record is None or not has_worker_quotas(record.quotas):
        return ""
    room = QuotaRoom.of(record.quotas)
    for order in view.orders.values():
        if project_of(order.spec.name) == project and (order.stage is None or order.stage.index == 0):
            room.take(1, order.spec.memory_bytes)
    return "" if room.fits(1, memory_bytes) else f"project {project} runs all that its quota of workers allows"
