"""Deploy policy: gives a spec its full name, and checks the caller's limits, the project's quotas, secrets and volumes.

A name in another project is another function. Decisions use the view alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from math import ceil

import msgspec

from fleetstart.runtime.contract.errors import Forbidden, InvalidSpec
from fleetstart.runtime.contract.function.names import full_name, project_of
from fleetstart.runtime.contract.function.spec import MEMORY_MIN_BYTES, FunctionSpec
from fleetstart.runtime.contract.function.volume import parse_volume, volume_name
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.sizes import MIB

from ..planner.constraints import device_need, needs_gpu
from ..planner.devices import missing_devices
from ..state.access_records import DEFAULT, Quotas
from ..state.access_table import AccessTable
from ..state.records import ScaleOverride, VersionKey
from ..state.view import View
from .authorize import Caller
from .lookups import demands_of
from .quotas import ResourceDemand, check_quotas

SECRETS_MAX_BYTES = 48 * 1024
"""Total size of one function's secrets: they travel to its worker in one message, with its spec."""


def apply_deploy_policy(view: View, caller: Caller, spec: FunctionSpec) -> FunctionSpec:
    """Returns the spec with its full name and project. Errors: Forbidden, InvalidSpec, QuotaExceeded."""
    spec = named_spec(view, caller, spec)
    check_kv_memory(view, spec)
    check_devices(view, spec)
    check_network(view.access, caller, spec)
    _check_secrets(view.access, spec.home, spec)
    _check_volumes(view.access, spec.home, spec)
    wanted = ResourceDemand(function=spec.name, workers=spec.scale.max, memory_bytes=spec.scale.max * spec.memory_bytes)
    _check_quotas(view, spec.home, wanted)
    return spec


def named_spec(view: View, caller: Caller, spec: FunctionSpec) -> FunctionSpec:
    """Returns the spec with its full name, and its project by that name. A name without a project is in that of the
    spec, else in the caller's.

    Errors: Forbidden for what the caller's key does not cover; InvalidSpec if there is no such project.
    """
    name = full_name(spec.name, spec.project or caller.home)
    project = project_of(name)
    key = caller.key
    if key is not None and not key.covers(name):
        may = f"functions {', '.join(key.functions)}" if key.functions else f"project {key.project}"
        limit = f"--function {name}" if key.functions else f"--project {project}"
        raise Forbidden(
            f"key {caller.name} is for {may}, and not for {name}",
            hint=f"an admin makes a key that may: fs key create NAME --scope deploy {limit}",
        )
    if not view.access.has_project(project):
        raise InvalidSpec(f"project {project} does not exist", hint=_near(caller, project, view.access.projects))
    return msgspec.structs.replace(spec, name=name, project="" if project == DEFAULT else project)


def check_kv_memory(view: View, spec: FunctionSpec) -> None:
    """Checks that the KV cache fits into the memory of a worker without a GPU: on one it is in device memory. A node
    that does not list its devices lets every worker have its GPUs.

    Here and not in the spec: what was deployed before must stay readable. Errors: InvalidSpec.
    """
    if spec.llm is None or not needs_gpu(spec):
        return
    with_gpus = [seen.report for seen in view.nodes.values() if seen.report.gpus]
    if any(spec.gpu is not None or not report.devices for report in with_gpus):
        return
    lacks = "it asks for no GPU" if with_gpus else "no node has a GPU"
    kv_mib, memory_mib = spec.llm.kv_memory_bytes / MIB, spec.memory_bytes / MIB
    raise InvalidSpec(
        f"function {spec.name}: kv_memory is {kv_mib:g} MiB and lies in the worker's memory of {memory_mib:g} MiB, "
        f"since {lacks}; {MEMORY_MIN_BYTES // MIB} MiB of it at least must be left",
        hint=f"raise memory, for example to {ceil(kv_mib + memory_mib)} MiB, lower kv_memory, or ask for a GPU: gpu=1",
    )


def check_devices(view: View, spec: FunctionSpec) -> None:
    """Checks that some node has the devices that the function asks for, free or not. Errors: InvalidSpec."""
    need = device_need(spec)
    if need is None or not view.nodes:
        return
    if why := missing_devices(need, [seen.report for seen in view.nodes.values()]):
        raise InvalidSpec(
            f"function {spec.name}: {why}",
            hint="ask for what a node has, or start a node with such devices first (FS_DEVICES, `fs nodes`)",
        )


def check_network(table: AccessTable, caller: Caller, spec: FunctionSpec) -> None:
    """Checks the right to `network=True`, which puts a worker into the node's network: no list and nothing that a node
    denies binds it there. Errors: Forbidden."""
    if spec.network is not True or caller.key is None or (caller.key.may("admin") and not caller.limited):
        return
    record = table.projects.get(spec.home)
    if record is None or record.network != "any":
        raise Forbidden(
            f"function {spec.name} asks for the node's whole network (network=True), which key {caller.name} may not "
            f"give to functions of project {spec.home}",
            hint='list what it reaches: network=["api.example.com"]; or an admin allows it: '
            f"fs project quota {spec.home} --network any",
        )


def check_scale(view: View, function: FunctionName, wanted: ScaleOverride | None) -> None:
    """Checks a scaling against the project's quotas. Errors: QuotaExceeded."""
    version = view.live(function)
    if version is None or wanted is None or wanted.max is None:
        return
    claim = ResourceDemand(function=function, workers=wanted.max, memory_bytes=wanted.max * version.spec.memory_bytes)
    _check_quotas(view, project_of(function), claim)


def functions_using_secret(view: View, project: str, secret: str) -> list[FunctionName]:
    """Lists the functions whose live version declares the secret."""
    found = []
    for record in view.functions.values():
        version = view.versions.get(VersionKey(record.name, record.live))
        if version is not None and secret in version.spec.secrets and project_of(record.name) == project:
            found.append(record.name)
    return sorted(found)


def _check_secrets(table: AccessTable, project: str, spec: FunctionSpec) -> None:
    total_bytes = 0
    for name in spec.secrets:
        record = table.secret(project, name)
        if record is None:
            there = table.secret_names(project)
            of = "" if project == DEFAULT else f" --project {project}"
            near = get_close_matches(name, there, n=1)
            raise InvalidSpec(
                f"function {spec.name}: project {project} has no secret {name}",
                hint=f"did you mean {near[0]}?" if near else f"set it first: fs secret set {name}{of}",
            )
        total_bytes += record.size_bytes
    if total_bytes > SECRETS_MAX_BYTES:
        raise InvalidSpec(
            f"function {spec.name}: its secrets have {total_bytes} bytes, {SECRETS_MAX_BYTES} at most",
            hint="large files belong into the bundle or the weights, encrypted if need be",
        )


def _check_volumes(table: AccessTable, project: str, spec: FunctionSpec) -> None:
    for ref in map(parse_volume, spec.volumes):
        full = volume_name(project, ref.name)
        record = table.volume(project, ref.name)
        if record is None:
            there = [one.rpartition(".")[2] for one in table.volume_names(project)]
            near = get_close_matches(ref.name, there, n=1)
            raise InvalidSpec(
                f"function {spec.name}: project {project} has no volume {ref.name}",
                hint=f"did you mean {near[0]}?" if near else f"make it first: fs volume create {full}",
            )
        if record.latest is None and not ref.write:
            raise InvalidSpec(
                f"function {spec.name}: volume {ref.name} has no version yet",
                hint=f"put a folder into it: fs volume put {full} FOLDER",
            )
        if ref.version is not None and all(version.number != ref.version for version in record.versions):
            raise InvalidSpec(
                f"function {spec.name}: volume {ref.name} has no version {ref.version}",
                hint=f"`fs volume versions {full}` lists them",
            )


def _check_quotas(view: View, project: str, wanted: ResourceDemand) -> None:
    """A function keeps what it has already, even if the quota was lowered since."""
    record = view.access.projects.get(project)
    if record is None or record.quotas == Quotas():
        return
    claims = {claim.function: claim for claim in demands_of(view, project)}
    present = claims.pop(wanted.function, None)
    check_quotas(project, record.quotas, claims.values(), wanted, present)


def _near(caller: Caller, name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, [project for project in known if caller.sees_project(project)], n=1)
    return f"did you mean {near[0]}?" if near else f"make it first: fs project create {name}"
