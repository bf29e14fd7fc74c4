"""Chooses the versions of volumes that a worker gets, when it is ordered. It keeps them to its end."""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.errors import FleetError, StartFailed
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function.volume import MountedVolume, Mounts, VolumeRef, parse_volume
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..planner.plan import FileTree
from ..state.access_table import AccessTable
from ..state.view import View


def with_mounts(view: View, order: WorkerOrder) -> WorkerOrder:
    """The order with its volumes; unchanged if it needs none, or has them."""
    if not order.spec.volumes or order.mounts is not None or order.wanted != "run":
        return order
    return msgspec.structs.replace(order, mounts=mounts_of(view.access, order.spec))


def mounts_of(table: AccessTable, spec: FunctionSpec) -> Mounts:
    """The volumes of a function in the versions that a worker ordered now gets, or why it cannot."""
    try:
        return Mounts(volumes=[_mounted(table, spec.home, parse_volume(text)) for text in spec.volumes])
    except FleetError as error:
        return Mounts(error=f"{error.message}: {error.hint}" if error.hint else error.message)


def volume_trees(table: AccessTable, spec: FunctionSpec) -> list[FileTree]:
    """The files of the volumes that a worker ordered now gets, less those of volumes that it cannot get."""
    found = []
    for ref in map(parse_volume, spec.volumes):
        record = table.volume(spec.home, ref.name)
        version = record.latest if record is not None and ref.version is None else None
        if record is not None and ref.version is not None:
            version = next((one for one in record.versions if one.number == ref.version), None)
        if version is not None:
            found.append(FileTree(version.tree, version.size_bytes))
    return found


def _mounted(table: AccessTable, project: str, ref: VolumeRef) -> MountedVolume:
    record = table.volume(project, ref.name)
    if record is None:
        raise StartFailed(f"volume {ref.name} of project {project} was removed", hint=f"`fs volume create {ref.name}`")
    if ref.write and record.latest is None:
        return MountedVolume(name=ref.name, number=0, write=True)
    version = record.version(ref.version)
    return MountedVolume(name=ref.name, number=version.number, tree=version.tree, write=ref.write)
