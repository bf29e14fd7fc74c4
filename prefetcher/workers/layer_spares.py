"""Spare workers that are prepared for one version: confined, with the packages imported that it imported before.

Importing packages is the larger part of many starts. It cannot move into the fork server, whose children belong to
different functions and which no package may run in. So a waiting worker of its own does it, confined as it will be
with the function's code, in namespaces or in a container of its own: a version that has had a worker here keeps one
spare, until its memory is needed, or nobody called for a while. A spare that crashes, or from which a start failed, is
not made again for that version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, LayerId
from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import DeviceBinding, Prepare, Prepared
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..layers.cache import LayerCache
from ..processes.forked_process import ChannelEnded, ForkedProcess, ProcessEvent, ProcessExited
from ..processes.prefork_pool import PreforkPool
from ..processes.process_memory import private_bytes
from .bundles import BundleCache
from .layer_spare_policy import SpareState, VersionOf, expired, surplus
from .sandboxes import send_preparation

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 60.0
"""Limit from the fork to `Prepared`: the largest libraries take ten seconds on a slow disk."""
WANTED_MAX = 64
"""Versions that are remembered as wanting a spare; more than a node has room for."""
REMEMBERED_MAX = 1000
TICK_S = 0.5
END_TIMEOUT_S = 2.5


@dataclass(slots=True)
class _Spare:
    """A prepared worker that waits."""

    process: ForkedProcess
    spec: FunctionSpec
    layer: LayerId
    modules: frozenset[str]
    size_bytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class _Making:
    """A spare that is being prepared."""

    version: VersionOf
    spec: FunctionSpec
    ended: asyncio.Event


class LayerSpares:
    """The prepared spares of one node."""

    def __init__(
        self,
        *,
        prefork_pool: PreforkPool,
        layers: LayerCache,
        bundles: BundleCache,
        cpus: int,
        binding: Callable[[], DeviceBinding | None],
        room_bytes: Callable[[], int],
    ) -> None:
        """`binding`: that of workers without devices; `room_bytes`: memory of the node that neither workers nor
        segments nor spares have."""
        self._prefork_pool = prefork_pool
        self._layers = layers
        self._bundles = bundles
        self._cpus = cpus
        self._binding = binding
        self._room_bytes = room_bytes
        self._spares: dict[VersionOf, _Spare] = {}
        self._making: _Making | None = None
        self._wanted: dict[VersionOf, FunctionSpec] = {}
        self._distrusted: dict[VersionOf, None] = {}
        """Versions from whose spares nothing good came; the latest ones."""
        self._sizes: dict[VersionOf, int] = {}
        """Memory that the last spare of a version took."""
        self._woken = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        return sum(spare.size_bytes for spare in list(self._spares.values()))  # other threads ask, too

    @property
    def bundles(self) -> frozenset[BundleId]:
        """Bundles that its spares see."""
        making = [self._making.spec] if self._making is not None else []
        return frozenset(spec.bundle for spec in [*making, *(spare.spec for spare in self._spares.values())])

    async def take(self, order: WorkerOrder) -> ForkedProcess | None:
        """The spare that is prepared for this order's version, if there is one. The caller owns its process.

        One that is being prepared is waited for: it has begun, and a worker that begins now would only slow it down.
        """
        making, version = self._making, _version(order)
        if making is not None and making.version == version and making.spec == order.spec and not order.shell:
            await making.ended.wait()
        spare = None if order.shell else self._spares.get(version)
        if spare is None or spare.spec != order.spec:  # a stage of a pipeline may have a limit of its own
            return None
        current = not order.spec.image or await self._prefork_pool.is_current(spare.process)
        if self._spares.get(version) is not spare:  # another start has it meanwhile, or its memory was needed
            return None
        if not current:
            self._end(version, "its image's name means another one now, or none")
            return None
        del self._spares[version]
        self._layers.release(spare.layer, spare.process.fork_id)
        return spare.process

    def learn(self, order: WorkerOrder, modules: list[str]) -> None:
        """Keeps which modules of its packages a worker has imported; a spare with them is made when no start is under
        way."""
        spec = order.spec
        if spec.layer is None or order.shell or spec.isolation == "gvisor" or spec.volumes or spec.gpu is not None:
            return  # a process that waits is confined, and its volumes and devices are those of an assignment
        self._layers.learn_imports(spec.layer, spec.name, modules)
        version = _version(order)
        if version in self._distrusted:
            return
        self._end_outgrown(version)
        self._wanted.pop(version, None)
        self._wanted[version] = spec
        while len(self._wanted) > WANTED_MAX:
            self._wanted.pop(next(iter(self._wanted)))
        self._woken.set()

    def distrust(self, order: WorkerOrder) -> None:
        """A start from a spare failed: this version's next ones are ordinary."""
        self._distrust(_version(order))

    def reclaim(self, needed_bytes: int) -> int:
        """Ends spares, those that waited longest first, until so many bytes are free; returns how many are."""
        freed_bytes = 0
        for version in surplus(self._states(), needed_bytes):
            freed_bytes += self._spares[version].size_bytes
            self._end(version, "its memory is needed")
        return freed_bytes

    def give_up(self) -> None:
        """Ends all spares, so that none holds a layer."""
        for version in list(self._spares):
            self._end(version, "the disk has no room for another layer")

    async def run(self) -> None:
        """Makes the spares that are wanted, one at a time, until cancelled."""
        while True:
            for unneeded in expired(self._states(), time.monotonic()):
                self._end(unneeded, "it was not needed")
            version = next((version for version in reversed(self._wanted) if version not in self._spares), None)
            if version is not None and self._prefork_pool.is_quiet:
                self._making = _Making(version, self._wanted[version], asyncio.Event())
                try:
                    await self._make(version, self._making.spec)
                finally:
                    self._making.ended.set()
                    self._making = None
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._woken.wait()
            self._woken.clear()

    async def close(self) -> None:
        """Ends all spares while their fork servers still run to reap them."""
        ends = [asyncio.create_task(spare.process.exited.wait()) for spare in self._spares.values()]
        for version in list(self._spares):
            self._end(version, "the node shuts down")
        if ends:
            await asyncio.wait(ends, timeout=END_TIMEOUT_S)

    async def _make(self, version: VersionOf, spec: FunctionSpec) -> None:
        modules = self._layers.imports(spec.layer, spec.name) if spec.layer is not None else []
        needed_bytes = self._sizes.get(version, spec.memory_bytes)
        if not modules or needed_bytes > self._room_bytes():
            self._wanted.pop(version, None)  # wanted again with its next start
            return
        process: ForkedProcess | None = None
        prepared, why = False, "it ended while it imported its packages"
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                network = spec.network is True
                process = await self._prefork_pool.fork(spec.preloaded_pool, network=network, image=spec.image)
                prepared = await self._prepare(process, spec, modules)
        except (TimeoutError, FleetError, OSError, ValueError) as error:
            why = str(error) or f"it was not prepared after {PREPARE_TIMEOUT_S:g} s"
        finally:
            if not prepared and process is not None:
                self._discard(process, spec.layer)
        if not prepared or process is None or spec.layer is None:
            log.warning("a spare worker could not be prepared", extra={"version": str(version), "why": why})
            self._distrust(version)
            return
        size_bytes = self._sizes[version] = private_bytes(process.pid)
        while len(self._sizes) > REMEMBERED_MAX:
            self._sizes.pop(next(iter(self._sizes)))
        self._spares[version] = _Spare(process, spec, spec.layer, frozenset(modules), size_bytes, time.monotonic())
        self._wanted.pop(version, None)
        process.listen(lambda event: self._on_event(version, process, event))
        extra = {"version": str(version), "modules": len(modules), "size_bytes": size_bytes}
        log.info("spare worker prepared", extra=extra)
        if self._end_outgrown(version):  # a worker reported more modules while these were imported
            self._wanted[version] = spec

    async def _prepare(self, process: ForkedProcess, spec: FunctionSpec, modules: list[str]) -> bool:
        """True if the process has prepared itself. Errors: FleetError, OSError, ValueError if the list is too long."""
        bundle = self._bundles.ready(spec.bundle)
        if bundle is None or spec.layer is None:
            return False
        layer_dir = await self._layers.acquire(spec.layer, process.fork_id)
        if process.group is not None:
            process.group.limit(spec.memory_bytes)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_event(event: ProcessEvent) -> None:
            if isinstance(event, Prepared | ChannelEnded | ProcessExited) and not answer.done():
                answer.set_result(isinstance(event, Prepared))

        process.listen(on_event)
        message = Prepare(
            spec=spec,
            bundle_dir=str(bundle),
            layer_dir=layer_dir,
            modules=modules,
            threads=self._cpus,
            user=self._prefork_pool.give_user(process, spec.name),
            binding=self._binding(),
        )
        try:
            await send_preparation(process, message)
        except ChannelClosed:
            return False
        return await answer

    def _on_event(self, version: VersionOf, process: ForkedProcess, event: ProcessEvent) -> None:
        """Drops a spare that has ended. Its version may have another if it was killed from outside, as by the end of an
        engine with all of its containers."""
        if not isinstance(event, ChannelEnded | ProcessExited):
            return
        spare = self._spares.get(version)
        if spare is not None and spare.process is process:
            log.warning("a prepared spare worker died", extra={"version": str(version)})
            crashed = process.group is not None and process.group.oom_kills() > 0
            self._end(version, "it died")
            if crashed:
                self._distrust(version)
        if isinstance(event, ProcessExited) and event.status not in (None, -signal.SIGKILL):
            self._distrust(version)

    def _end_outgrown(self, version: VersionOf) -> bool:
        """Ends the version's spare if it lacks modules that the version is known to import; returns True if it did."""
        spare = self._spares.get(version)
        if spare is None or spare.modules.issuperset(self._layers.imports(spare.layer, spare.spec.name)):
            return False
        self._end(version, "its version imports more by now")
        return True

    def _distrust(self, version: VersionOf) -> None:
        self._distrusted[version] = None
        self._wanted.pop(version, None)
        while len(self._distrusted) > REMEMBERED_MAX:
            self._distrusted.pop(next(iter(self._distrusted)))

    def _end(self, version: VersionOf, why: str) -> None:
        spare = self._spares.pop(version)
        self._wanted.pop(version, None)
        log.info("prepared spare worker ended", extra={"version": str(version), "why": why})
        self._discard(spare.process, spare.layer)

    def _discard(self, process: ForkedProcess, layer: LayerId | None) -> None:
        if layer is not None:
            self._layers.release(layer, process.fork_id)
        process.kill()
        process.close()
        self._prefork_pool.remove_group(process.group)

    def _states(self) -> dict[VersionOf, SpareState]:
        return {version: SpareState(spare.size_bytes, spare.since_s) for version, spare in self._spares.items()}


def _version(order: WorkerOrder) -> VersionOf:
    return VersionOf(order.spec.name, order.version)
