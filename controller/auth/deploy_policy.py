"""Deploy policy: resolves a function's project and checks the caller's limits, the project's quotas and its secrets.

A function stays in the project in which it was deployed first. Decisions use the view alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from math import ceil

import msgspec

from fleetstart.runtime.contract.errors import Forbidden, InvalidSpec
from fleetstart.runtime.contract.function.spec import MEMORY_MIN_BYTES, FunctionSpec
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.sizes import MIB

from ..planner.constraints import needs_gpu
from ..state.access_records import DEFAULT, Quotas
from ..state.access_table import AccessTable
from ..state.records import ScaleOverride, VersionKey
from ..state.unreadable import unreadable
from ..state.view import View
from .authorize import Caller
from .lookups import demands_of, project_of
from .quotas import ResourceDemand, check_quotas

SECRETS_MAX_BYTES = 48 * 1024
"""Total size of one function's secrets: they travel to its worker in one message, with its spec."""


def apply_deploy_policy(view: View, caller: Caller, spec: FunctionSpec) -> FunctionSpec:
    """Returns the spec with its project filled in. Errors: Forbidden, InvalidSpec, QuotaExceeded."""
    functions = caller.key.functions if caller.key is not None else []
    if functions and spec.name not in functions:
        raise Forbidden(
            f"key {caller.name} may deploy {', '.join(functions)}, and not {spec.name}",
            hint=f"an admin makes a key that may: fs key create NAME --scope deploy --function {spec.name}",
        )
    project = _project(view, caller, spec)
    check_kv_memory(view, spec)
    _check_secrets(view.access, project, spec)
    wanted = ResourceDemand(function=spec.name, workers=spec.scale.max, memory_bytes=spec.scale.max * spec.memory_bytes)
    _check_quotas(view, project, wanted)
    return msgspec.structs.replace(spec, project="" if project == DEFAULT else project)


def check_kv_memory(view: View, spec: FunctionSpec) -> None:
    """Checks that the KV cache fits into the worker's memory, unless a node has a GPU: there it is in device memory.

    Here and not in the spec: what was deployed before must stay readable. Errors: InvalidSpec.
    """
    if spec.llm is None or not needs_gpu(spec) or any(seen.report.gpus for seen in view.nodes.values()):
        return
    kv_mib, memory_mib = spec.llm.kv_memory_bytes / MIB, spec.memory_bytes / MIB
    raise InvalidSpec(
        f"function {spec.name}: kv_memory is {kv_mib:g} MiB and lies in the worker's memory of {memory_mib:g} MiB, "
        f"since no node has a GPU; {MEMORY_MIN_BYTES // MIB} MiB of it at least must be left",
        hint=f"raise memory, for example to {ceil(kv_mib + memory_mib)} MiB, or lower kv_memory",
    )


def check_scale(view: View, function: FunctionName, wanted: ScaleOverride | None) -> None:
    """Checks a scaling against the project's quotas. Errors: QuotaExceeded."""
    version = view.live(function)
    if version is None or wanted is None or wanted.max is None:
        return
    claim = ResourceDemand(function=function, workers=wanted.max, memory_bytes=wanted.max * version.spec.memory_bytes)
    _check_quotas(view, version.spec.project or DEFAULT, claim)


def functions_using_secret(view: View, project: str, secret: str) -> list[FunctionName]:
    """Lists the functions whose live version declares the secret."""
    found = []
    for record in view.functions.values():
        version = view.versions.get(VersionKey(record.name, record.live))
        if version is not None and secret in version.spec.secrets and (version.spec.project or DEFAULT) == project:
            found.append(record.name)
    return sorted(found)


def _project(view: View, caller: Caller, spec: FunctionSpec) -> str:
    present = project_of(view, spec.name)
    if present is None and (spec.name in view.functions or spec.name in view.unreadable.names("function")):
        raise unreadable(f"function {spec.name}, which exists already,", "its project is not known")
    wanted = spec.project or present or caller.project or DEFAULT
    if caller.project and present is not None and present != caller.project:
        raise InvalidSpec(f"the name {spec.name} is taken", hint="names are one for all projects: choose another")
    if present is not None and wanted != present:
        raise InvalidSpec(
            f"function {spec.name} is in project {present}, and cannot move to {wanted}",
            hint=f"deploy it with --project {present}, or remove it there first: fs rm {spec.name}",
        )
    if caller.project and wanted != caller.project:
        raise Forbidden(
            f"key {caller.name} is for project {caller.project}, and not for {wanted}",
            hint=f"an admin makes a key that may: fs key create NAME --scope deploy --project {wanted}",
        )
    if not view.access.has_project(wanted):
        raise InvalidSpec(f"project {wanted} does not exist", hint=_near(wanted, view.access.projects, "project"))
    return wanted


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


def _check_quotas(view: View, project: str, wanted: ResourceDemand) -> None:
    """A function keeps what it has already, even if the quota was lowered since."""
    record = view.access.projects.get(project)
    if record is None or record.quotas == Quotas():
        return
    claims = {claim.function: claim for claim in demands_of(view, project)}
    present = claims.pop(wanted.function, None)
    check_quotas(project, record.quotas, claims.values(), wanted, present)


def _near(name: str, known: Iterable[str], verb: str) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"make it first: fs {verb} create {name}"
