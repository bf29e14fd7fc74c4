"""Registry of functions and their immutable, numbered versions.

A deploy is rejected unless bundle, layer, weights and adapter are complete in the store and fit together. The spec of a
version in service makes no new version, but clears the failed starts of a broken one. A removed function leaves its
version numbers behind, and nothing that the next function of its name could read. `state.traffic` decides which
version gets calls. Each change is a compare-and-set in one script, which fails if the weights are being removed
(`deletion_guard`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import msgspec

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError, InvalidSpec, NotFound, Unavailable
from fleetstart.runtime.contract.function.layer import packages_for
from fleetstart.runtime.contract.function.spec import FunctionSpec, spec_digest
from fleetstart.runtime.contract.ids import LIVE, BundleId, CheckpointId, FunctionName, Version
from fleetstart.runtime.contract.object_keys import bundle_key
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.lora import CONFIG, CONFIG_MAX_BYTES, is_adapter, read_adapter, require_fit
from fleetstart.runtime.contract.weights.manifest import Manifest
from fleetstart.runtime.contract.weights.stage import LayerLayout, layout_of

from ..state import traffic
from ..state.records import Failure, FunctionRecord, Rollout, VersionKey, VersionRecord
from ..state.redis_client import Script
from ..state.sync import StateSync
from ..state.unreadable import unreadable
from ..state.view import View
from ..storage.object_store import ObjectStore, read_file, require_bundle, require_checkpoint, require_layer
from .deletion_guard import DeletionGuard

log = logging.getLogger(__name__)

TRIES = 20
"""Attempts of a compare-and-set. So many concurrent changes of one function are a bug."""
LATE_LOGS_S = 2 * 86_400
"""How long log lines of a removed function's workers are kept: longer than any worker drains."""
VERSIONS_KEPT = 200
"""Versions kept of a function, those in service among them: a deploy each working hour of a month."""
VERSION_BYTES_KEPT = 8 * MIB
"""Bytes of their records: of a large spec, a hundred."""
FUNCTIONS_AT_ONCE = 250
"""Functions whose versions are read in one turn of the loop: some milliseconds."""
NO_VERSION = Version(0)
"""Stands for no version: numbers begin with 1."""


class WeightNeeds(NamedTuple):
    """What a version's weights need."""

    segment_bytes: int
    """Memory on a node."""
    chunks: int
    """Chunks of the checkpoint, without those of an adapter."""
    layout: LayerLayout | None
    """Its layers, if it can be cut into stages."""


class Registry:
    """Deploys, changes, reads and deletes functions. Errors: REDIS_ERRORS."""

    def __init__(self, state: StateSync, store: ObjectStore) -> None:
        self._state = state
        self._store = store
        self._script = Script(state.client, "registry")
        self._remove = Script(state.client, "remove_function")
        self._prune_script = Script(state.client, "prune_versions")
        self._decoder = RecordDecoder(VersionRecord)
        self._functions = RecordDecoder(FunctionRecord)
        self.deletion_guard = DeletionGuard(state.client)

    @property
    def view(self) -> View:
        return self._state.view

    async def deploy(
        self, spec: FunctionSpec, now_unix_ms: int, *, alias: str = LIVE, percent: int = 100, probe: bool = False
    ) -> tuple[VersionRecord, bool]:
        """Deploys a spec; returns the version, and whether it is new. The alias points at it, with `probe` once it is
        ready.

        Errors: InvalidSpec, InvalidInput, WeightsMissing, CheckpointInvalid.
        """
        digest = spec_digest(spec)
        needed: list[str] = [spec.bundle, *stored_of(spec)]
        for _ in range(TRIES):
            marks = await self.deletion_guard.marks(needed, now_unix_ms)  # before the look into the store
            await require_bundle(self._store, spec.name, spec.bundle)
            needs = await self._require_weights(spec)
            packages = await require_layer(self._store, spec.name, spec.layer) if spec.layer is not None else None
            raw, function = await self._function(spec.name)
            known = await self._same(function, digest)
            record = known or VersionRecord(
                version=await self._next_version(spec.name),
                digest=digest,
                spec=spec,
                segment_bytes=needs.segment_bytes,
                created_unix_ms=now_unix_ms,
                layout=needs.layout,
                chunks=needs.chunks,
                packages_bytes=packages.total_bytes if packages is not None else 0,
                packages_for=packages_for(packages.python, packages.platform) if packages is not None else "",
            )
            plan = Rollout(version=record.version, alias=alias, percent=percent, begun_unix_ms=now_unix_ms)
            failure = self._state.view.failures.get(VersionKey(spec.name, record.version))
            new = _after(function, spec.name, plan, failure, probe=probe)
            data = msgspec.json.encode(record) if known is None else b""
            if await self._run(spec.name, raw, new, record.version, data, list(zip(needed, marks, strict=True))):
                if known is None:
                    await self._prune(spec.name, now_unix_ms)
                await self._state.resync()
                return record, known is None
        raise _busy(spec.name)

    async def _prune(self, name: FunctionName, now_unix_ms: int) -> None:
        """Removes old versions beyond what is kept of a function, with code that no other version has. A change that
        comes between leaves them to the next deploy."""
        raw, function = await self._function(name)
        stored = await cast(Awaitable[dict[bytes, bytes]], self._state.client.hgetall(keys.versions(name)))
        if function is None:
            return
        sizes = {Version(int(number)): len(record) for number, record in stored.items()}
        old = prunable(sizes, traffic.tracked_versions(function) | set(function.past))
        if not old:
            return
        bundles = {one.spec.bundle for one in await self.versions(name) if one.version in old}
        failures = [keys.failures(name, version) for version in old]
        measures = [keys.measures_of_version(name, version) for version in old]
        owned = [keys.FUNCTIONS, keys.versions(name), keys.MEASURES, *failures]
        if await self._prune_script(owned, [name, raw, len(old), *old, *measures]):
            log.info("old versions are removed", extra={"function": name, "versions": len(old)})
            await self._delete_bundles(bundles, now_unix_ms)

    async def change(
        self, name: FunctionName, change: Callable[[FunctionRecord], FunctionRecord], *, fresh: Version = NO_VERSION
    ) -> FunctionRecord:
        """Changes a function's record and returns it. `fresh` names a version whose failed starts are cleared with it.

        Errors: NotFound; those of `change`.
        """
        for _ in range(TRIES):
            raw, function = await self._function(name)
            if function is None:
                raise NotFound(f"function {name[:127]} does not exist", hint="`fs ls` lists what does")
            new = change(function)
            if await self._run(name, raw, msgspec.json.encode(new), fresh, b""):
                await self._state.resync()
                return new
        raise _busy(name)

    async def version(self, name: FunctionName, version: Version) -> VersionRecord:
        """Reads one version. Errors: NotFound."""
        record = await self._state.version(VersionKey(name, version))
        if record is None:
            raise NotFound(
                f"function {name[:127]} has no version {version}", hint=f"`fs versions {name[:127]}` lists them"
            )
        return record

    async def versions(self, name: FunctionName) -> list[VersionRecord]:
        """Lists all versions of a function that this release can read, also replaced ones, the newest first."""
        answer = self._state.client.hgetall(keys.versions(name))
        found = []
        for number, raw in (await cast(Awaitable[dict[bytes, bytes]], answer)).items():
            try:
                found.append(self._decoder.decode(raw))
            except UnreadableRecord as error:
                self._state.view.unreadable.note("version", f"{name}@{number.decode(errors='replace')}", error)
        return sorted(found, key=lambda record: -record.version)

    async def delete(self, name: FunctionName, now_unix_ms: int) -> None:
        """Deletes a function with its versions, its logs, and bundles that no other function needs.

        Its name is free at once; the scheduler drains its workers. Its version numbers are not given again. Its budget
        stays: who may deploy cannot get rid of it.
        """
        for _ in range(TRIES):
            raw, function = await self._function(name)
            if function is None:
                raise NotFound(f"function {name} does not exist", hint="`fs ls` lists what does")
            bundles = {one.spec.bundle for one in await self.versions(name)}
            if await self._removed(name, raw, await self._numbers(name)):
                await self._state.resync()
                await self._delete_bundles(bundles, now_unix_ms)
                return
        raise _busy(name)

    async def _removed(self, name: FunctionName, raw: bytes, versions: Sequence[Version]) -> bool:
        failures = [keys.failures(name, version) for version in versions]
        measures = [keys.measures_of_version(name, version) for version in versions]
        return bool(
            await self._remove(
                [keys.FUNCTIONS, keys.versions(name), keys.FUNCTIONS_LAST, keys.logs(name), keys.MEASURES, *failures],
                [name, raw, max(versions, default=0), keys.EVENTS_FUNCTIONS, LATE_LOGS_S, *measures],
            )
        )

    async def _delete_bundles(self, bundles: Iterable[BundleId], now_unix_ms: int) -> None:
        """Deletes those bundles that no function needs. What fails stays in the store, and is logged."""
        for bundle in bundles:
            token = await self.deletion_guard.begin(bundle, now_unix_ms)
            try:
                if not any(one.spec.bundle == bundle for one in await self._all_versions(strict=True)):
                    await self._store.delete(bundle_key(bundle))
            except FleetError as error:
                log.warning("a bundle stays in the store", extra={"bundle": bundle[:12], "error": error.message})
            finally:
                await self.deletion_guard.end(bundle, token)

    async def uses(self, *, strict: bool = True) -> dict[CheckpointId, list[str]]:
        """Maps each checkpoint, and each layer of packages, to the versions (`name@version`) of deployed functions that
        need it, old ones too.

        Versions that cannot be read may need any of them. Errors: Unavailable, if `strict`, because of these.
        """
        found: dict[CheckpointId, list[str]] = {}
        for record in await self._all_versions(strict=strict):
            for checkpoint in stored_of(record.spec):
                found.setdefault(checkpoint, []).append(str(VersionKey(record.spec.name, record.version)))
        return found

    async def _all_versions(self, *, strict: bool) -> list[VersionRecord]:
        """All versions of all functions, by name and number. Errors: Unavailable, if `strict`, for unreadable ones."""
        names = await cast(Awaitable[list[bytes]], self._state.client.hkeys(keys.FUNCTIONS))
        functions = sorted(FunctionName(name.decode()) for name in names)
        found: list[VersionRecord] = []
        for begin in range(0, len(functions), FUNCTIONS_AT_ONCE):
            some = functions[begin : begin + FUNCTIONS_AT_ONCE]
            async with self._state.client.pipeline(transaction=False) as pipe:
                for function in some:
                    pipe.hvals(keys.versions(function))
                answers = await pipe.execute()
            for function, raw_records in zip(some, answers, strict=True):
                found += self._decoded(function, raw_records, strict=strict)
        return found

    def _decoded(self, function: FunctionName, raw_records: list[bytes], *, strict: bool) -> list[VersionRecord]:
        records = []
        for raw in raw_records:
            try:
                records.append(self._decoder.decode(raw))
            except UnreadableRecord as error:
                if strict:
                    raise unreadable(f"a version of {function}, which may need anything,", error) from error
        return sorted(records, key=lambda record: record.version)

    async def _require_weights(self, spec: FunctionSpec) -> WeightNeeds:
        if spec.weights is None:
            return WeightNeeds(0, 0, None)
        base = await require_checkpoint(self._store, spec.name, spec.weights)
        layout, chunks = layout_of(base) if spec.in_layers else None, len(base.chunks)
        if spec.layered and layout is not None and not layout.layer_bytes:
            raise InvalidSpec(
                f"function {spec.name}: its weights have no numbered layers, and it is Layered",
                hint='name them, and deploy again: @function(weights=..., layers="features.{}")',
            )
        adapter_bytes = [await self._require_adapter(spec, base, one) for one in spec.checkpoints[1:]]
        return WeightNeeds(base.total_bytes + sum(adapter_bytes), chunks, layout)

    async def _require_adapter(self, spec: FunctionSpec, base: Manifest, checkpoint: CheckpointId) -> int:
        """Size of an adapter that fits the base. Errors: InvalidSpec, naming it if the function has several."""
        adapter = await require_checkpoint(self._store, spec.name, checkpoint)
        named = next((name for name, one in spec.adapters.items() if one == checkpoint), "")
        its = f"adapter {named}" if named else "adapter"
        if not is_adapter(adapter):
            raise InvalidSpec(
                f"function {spec.name}: its {its} has no {CONFIG}: these are weights, not a LoRA adapter",
                hint="`fs weights push FOLDER` marks a folder in PEFT's format as an adapter",
            )
        config = await read_file(self._store, checkpoint, adapter, CONFIG, CONFIG_MAX_BYTES)
        read = read_adapter(config, adapter.tensors.items(), patterns=False)
        require_fit(spec.name, base, read, named=named)
        if named and read.whole and spec.llm is not None and spec.llm.engine == "vllm":
            raise InvalidSpec(
                f"function {spec.name}: {its} replaces {next(iter(read.whole))}, and vLLM applies LoRA "
                "factors alone to requests that name an adapter",
                hint='serve it with engine="native", or alone: adapter="./lora" applies it to all requests',
            )
        return adapter.total_bytes

    async def _run(
        self,
        name: FunctionName,
        raw: bytes,
        new: bytes,
        version: Version,
        record: bytes,
        marks: Sequence[tuple[str, str]] = (),
    ) -> bool:
        return bool(
            await self._script(
                [
                    keys.FUNCTIONS,
                    keys.versions(name),
                    keys.failures(name, version),
                    keys.REMOVALS,
                    keys.FUNCTIONS_LAST,
                    keys.logs(name),
                ],
                [name, raw, new, version, record, keys.EVENTS_FUNCTIONS, *chain.from_iterable(marks)],
            )
        )

    async def _function(self, name: FunctionName) -> tuple[bytes, FunctionRecord | None]:
        """The function's record, as stored and decoded."""
        raw = await cast(Awaitable[bytes | None], self._state.client.hget(keys.FUNCTIONS, name)) or b""
        try:
            return raw, self._functions.decode(raw) if raw else None
        except UnreadableRecord as error:
            raise unreadable(f"function {name}", error) from error

    async def _same(self, function: FunctionRecord | None, digest: str) -> VersionRecord | None:
        """The newest version with this spec that is in service or being rolled out."""
        for version in sorted(traffic.tracked_versions(function), reverse=True) if function is not None else ():
            try:
                record = await self._state.version(VersionKey(function.name, version)) if function is not None else None
            except Unavailable:
                continue  # one that cannot be read is not the same
            if record is not None and record.digest == digest:
                return record
        return None

    async def _next_version(self, name: FunctionName) -> Version:
        """The next number: above all of the function, and of earlier ones of its name."""
        last = await cast(Awaitable[bytes | None], self._state.client.hget(keys.FUNCTIONS_LAST, name))
        return Version(max(int(last or 0), *await self._numbers(name), 0) + 1)

    async def _numbers(self, name: FunctionName) -> list[Version]:
        taken = await cast(Awaitable[list[bytes]], self._state.client.hkeys(keys.versions(name)))
        return [Version(int(number)) for number in taken]


def prunable(sizes: Mapping[Version, int], tracked: Collection[Version]) -> list[Version]:
    """The versions to remove, by the sizes of their records: the oldest, while there are too many of them or of their
    bytes, and none that is `tracked`."""
    count, total_bytes = len(sizes), sum(sizes.values())
    old: list[Version] = []
    for version in sorted(sizes):
        if count <= VERSIONS_KEPT and total_bytes <= VERSION_BYTES_KEPT:
            break
        if version not in tracked:
            old.append(version)
            count, total_bytes = count - 1, total_bytes - sizes[version]
    return old


def _after(
    function: FunctionRecord | None, name: FunctionName, plan: Rollout, failure: Failure | None, *, probe: bool
) -> bytes:
    """The record after a deploy."""
    if function is None:
        return msgspec.json.encode(traffic.created(name, plan, probe=probe))
    failed = traffic.last_failure(function, failure) if plan.version == function.live else None
    return msgspec.json.encode(traffic.deployed(function, plan, probe=probe, failed=failed))


def _busy(name: FunctionName) -> Unavailable:
    return Unavailable(f"function {name}: too many concurrent changes", retry_after_s=1)


def stored_of(spec: FunctionSpec) -> list[CheckpointId]:
    """The checkpoints and the layer of a spec: what may be removed from the store while no version needs it."""
    layer = [CheckpointId(spec.layer)] if spec.layer is not None else []
    return [*spec.checkpoints, *layer]
