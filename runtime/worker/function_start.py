"""Start of a function in its worker: device, import of the user's module, weights, `load()`.

Device initialisation and the import overlap with the weights, which the node streams into the segment meanwhile. Every
failure is raised as one FleetError that names the line of the user's code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract.errors import (
    DeviceOutOfMemory,
    ErrorInfo,
    FleetError,
    HandlerSyntax,
    InvalidSpec,
    NoHandler,
    StartFailed,
    WeightsMissing,
    error_from,
)
from ..contract.node.messages import Assign, DeviceLoaded
from ..contract.node.orders import SecondEngine
from ..contract.node.speed import ModeSwitch, Speed
from ..contract.timeline import Timeline
from ..handlers.app import handler_app, is_asgi, is_wsgi
from ..handlers.hooks import close_hook, run_start_hooks
from ..handlers.mounting import mounted
from ..sdk.context import with_context
from ..sdk.declarations import LLM, Layered, Transformers
from ..worker_io import user_errors
from ..worker_io.asgi import App
from ..worker_io.call_links import CallLinks
from ..worker_io.files_hint import files_hint
from ..worker_io.network_hint import network_hint
from ..worker_io.standby import Standby
from .device_init import DeviceInit
from .entry_import import import_entry

if TYPE_CHECKING:
    from ..contract.function.spec import LLMSettings
    from ..contract.weights.stage import Stage
    from ..llm.tensor_parallel.rank_process import RankProcesses
    from ..pipeline.node_messages import NodeMessages
    from ..pipeline.stage_context import StageContext
    from ..weights.tensor_mapping import TensorMapping
    from ..weights.weights import Weights

CLOSE_S = 10.0
"""Most of a drain's remaining grace period that a handler's close hooks get."""


@dataclass(frozen=True, slots=True)
class StartedApp:
    """A started function: its app, whether that may support ASGI lifespan, its close hook, its engine's speed.

    `close_s`: longest time of the close hook, after the calls have ended. `second_engine`: state of the engine that
    comes up behind the first one. `loaded`: weights moved to its devices.
    """

    app: App
    lifespan: bool
    close: Callable[[], None] | None
    speed: Callable[[], Speed | None] | None = None
    close_s: float = 0.0
    second_engine: Callable[[], SecondEngine | None] = lambda: None
    loaded: Callable[[], DeviceLoaded] = DeviceLoaded
    standby: Standby | None = None
    """How it gives its weights back and takes them again; None: it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartContext:
    """Inputs of a start: assignment, bundle folder, segment descriptors, event loop, and callbacks to the node.

    `want` asks for chunks of the weights that the worker waits for.
    """

    assign: Assign
    bundle_dir: str
    segment_fds: tuple[int, ...]
    loop: asyncio.AbstractEventLoop
    want: Callable[[range], object] = lambda chunks: None
    links: CallLinks | None = None
    """Over which the function calls others; None if it calls none."""
    node_messages: NodeMessages | None = None
    """Set for a pipeline stage, like the two callbacks below (see `StageContext`)."""
    ranks: RankProcesses | None = None
    """The other ranks of a language model that is split over devices."""
    on_consolidated: Callable[[ModeSwitch | None], object] = lambda switch: None
    on_end: Callable[[str], object] = lambda why: None


def start(starting: StartContext, timeline: Timeline) -> StartedApp:
    """Starts the function. Errors: FleetError; the traceback of a user's exception is in the log."""
    try:
        return _start(starting, timeline)
    except Exception as error:
        raise _explained(error, starting) from error
    except (SystemExit, KeyboardInterrupt) as error:
        user_errors.log(error, "the start failed:")
        place = user_errors.where(error, starting.bundle_dir)
        raise StartFailed(f"the module exited with {type(error).__name__} ({place})") from error


def _start(starting: StartContext, timeline: Timeline) -> StartedApp:
    spec = starting.assign.spec
    binding = starting.assign.binding
    device = DeviceInit(starting.assign.threads, timeline, binding.fractions if binding is not None else ())
    if spec.profile == "torch":
        device.begin()
    attached = _attach(starting)
    app = _start_app(starting, timeline, device, attached)
    return dataclasses.replace(app, loaded=lambda: _loaded(attached))


def _start_app(starting: StartContext, timeline: Timeline, device: DeviceInit, attached: list[Weights]) -> StartedApp:
    spec = starting.assign.spec
    target = None
    if spec.llm is None:
        with timeline.span("import"):
            target = import_entry(spec.entry, starting.bundle_dir)
    with timeline.span("load"):
        if spec.llm is not None:
            return _start_llm(starting, device, attached)
        if spec.layered:
            return _start_layered(starting, device, target, attached)
        handler = _build(target, device, _weights(attached), starting.loop)
        close = close_hook(handler, spec.entry, starting.loop)
        if is_asgi(handler):
            return StartedApp(_in_context(mounted(handler), starting), True, close, close_s=CLOSE_S)
        app = _in_context(_served(handler, starting), starting)
        if isinstance(target, Transformers):
            from ..pretrained import with_openai_routes

            app = with_openai_routes(handler, app, name=spec.name)
        return StartedApp(app, False, close, close_s=CLOSE_S)


def _served(handler: Any, starting: StartContext) -> App:
    """Errors: NoHandler, StartFailed, for a handler that cannot be served; NameError for an undefined name in it."""
    if is_wsgi(handler):
        raise NoHandler(
            f"{starting.assign.spec.entry.rpartition(':')[2]} is a WSGI app, and functions serve ASGI apps",
            hint="wrap it: `web = function(requirements=['a2wsgi', ...])(a2wsgi.WSGIMiddleware(app))`",
        )
    try:
        return handler_app(handler, slots=starting.assign.spec.concurrency, bundle_dir=starting.bundle_dir)
    except TypeError as error:
        if user_errors.where(error, starting.bundle_dir):
            raise
        raise StartFailed(str(error)) from error  # what is wrong with the signature: no traceback says more


def _loaded(attached: list[Weights]) -> DeviceLoaded:
    loads = [weights.loaded for weights in attached]
    return DeviceLoaded(size_bytes=sum(load.size_bytes for load in loads), busy_ns=sum(load.busy_ns for load in loads))


def _in_context(app: App, starting: StartContext) -> App:
    return with_context(app, starting.assign.spec.name, starting.assign.version, starting.links)


def _start_llm(starting: StartContext, device: DeviceInit, attached: list[Weights]) -> StartedApp:
    spec, threads = starting.assign.spec, starting.assign.threads
    weights: Any = _weights(attached if not spec.adapters else attached[:1])
    adapters = dict(zip(sorted(spec.adapters), attached[1:], strict=True)) if spec.adapters else None
    if weights is None or spec.llm is None:
        raise WeightsMissing(f"{spec.name} is an LLM and was assigned without weights")
    from ..llm import create_app

    device.wait()
    if starting.assign.stage is not None:
        return _start_stage(starting, _stage_context(starting, starting.assign.stage, attached[0]), spec.llm, weights)
    app = create_app(weights, spec.llm, name=spec.name, threads=threads, ranks=starting.ranks, adapters=adapters)
    return StartedApp(app, False, app.close, app.speed, second_engine=app.second_engine, standby=app)


def _stage_context(starting: StartContext, stage: Stage, weights: Weights) -> StageContext:
    from ..pipeline.stage_context import StageContext

    node_messages = starting.node_messages
    assert node_messages is not None
    return StageContext(
        stage=stage,
        secret=starting.assign.secret,
        identity=starting.assign.link_identity,
        node_messages=node_messages,
        deadline_ns=time.monotonic_ns() + round(starting.assign.spec.start_timeout_s * 1e9),
        prioritise_weights=lambda: starting.want(range(weights.chunk_waiter.chunk_count)),
        on_consolidated=starting.on_consolidated,
        on_end=starting.on_end,
    )


def _start_stage(starting: StartContext, context: StageContext, settings: LLMSettings, weights: Any) -> StartedApp:
    """Starts one stage of an LLM; a first stage is ready with its pipeline, a later one with its links."""
    from ..llm.distributed.stages import LLMFirstStage, LLMLaterStage

    spec, threads = starting.assign.spec, starting.assign.threads
    loaded: LLMFirstStage | LLMLaterStage
    if context.stage.index == 0:
        loaded = LLMFirstStage(weights, settings, context, name=spec.name, threads=threads)
    else:
        loaded = LLMLaterStage(weights, settings, context, name=spec.name, threads=threads)
    loaded.wait_until_ready()
    return StartedApp(loaded.app, False, loaded.close, loaded.speed)


def _start_layered(starting: StartContext, device: DeviceInit, target: Any, attached: list[Weights]) -> StartedApp:
    spec = starting.assign.spec
    if not attached:
        raise WeightsMissing(f"{spec.name} is Layered and was assigned without weights")
    from ..contract.weights.stage import layer_count
    from ..layered.app import instantiate_model
    from ..layered.stages import LayeredFirstStage, LayeredLaterStage, LayeredModel, whole_app

    device.wait()
    parts = LayeredModel(
        model=instantiate_model(target),
        weights=_weights(attached),
        layers=layer_count(attached[0].manifest),
        spec=spec,
        bundle_dir=starting.bundle_dir,
    )
    if starting.assign.stage is None:
        app = whole_app(parts)
        return StartedApp(_in_context(app, starting), False, None, app.speed)
    context = _stage_context(starting, starting.assign.stage, attached[0])
    loaded: LayeredFirstStage | LayeredLaterStage = (
        LayeredFirstStage(parts, context) if context.stage.index == 0 else LayeredLaterStage(parts, context)
    )
    loaded.wait_until_ready()
    return StartedApp(_in_context(loaded.app, starting), False, loaded.close, loaded.speed)


def _attach(starting: StartContext) -> list[Weights]:
    """Attaches the segments of the weights and of their adapters; they are mapped while the module is imported, unless
    this process reads a part of them only."""
    if not starting.segment_fds:
        return []
    from ..weights.weights import attach_segments

    deadline_ns = time.monotonic_ns() + round(starting.assign.spec.start_timeout_s * 1e9)
    attached = attach_segments(starting.assign.slabs, starting.segment_fds, deadline_ns=deadline_ns, want=starting.want)
    if starting.ranks is None:
        for weights in attached:
            weights.map_ahead()
    return attached


def _weights(attached: list[Weights]) -> TensorMapping | None:
    """The weights as `load()` receives them, with the adapter applied."""
    if len(attached) < 2:
        return attached[0] if attached else None
    from ..weights.lora import with_adapter

    return with_adapter(attached)


def _build(target: Any, device: DeviceInit, weights: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """The handler to serve; a class is instantiated and loaded."""
    if isinstance(target, LLM):
        raise InvalidSpec("the entry is an LLM, but the version was deployed without its llm settings: deploy again")
    if inspect.isclass(target) and issubclass(target, Layered):
        raise InvalidSpec(
            f"{target.__name__} is Layered, and the version was deployed as a plain class",
            hint="deploy it again; a class is recognised as Layered by its bases in the handler's own file",
        )
    if isinstance(target, Transformers):
        return _pretrained(target, device, weights, loop)
    if not callable(target):
        raise NoHandler(f"the entry is a {type(target).__name__}, which cannot be called")
    device.wait()
    if not inspect.isclass(target):
        return target
    handler = target()
    if not callable(handler):
        raise NoHandler(f"class {target.__name__} has no __call__", hint="add def __call__(self, request): ...")
    run_start_hooks(handler, weights if weights is not None else {}, loop)
    return handler


def _pretrained(target: Transformers, device: DeviceInit, weights: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """The handler of a task, loaded."""
    from ..pretrained import create_handler

    if weights is None:
        raise WeightsMissing(f"{target!r} was assigned without weights")
    device.wait()
    handler = create_handler(target.settings)
    run_start_hooks(handler, weights, loop)
    return handler


def _explained(error: Exception, starting: StartContext) -> FleetError:
    """The error for the caller. Errors of the platform itself are not logged with a traceback."""
    native = _segment_error(error)
    if native is not None:
        return native
    if isinstance(error, FleetError):
        return error
    if out_of_device_memory(error):
        devices = ", ".join(binding.devices) if (binding := starting.assign.binding) is not None else ""
        return DeviceOutOfMemory(
            f"out of device memory on {devices or 'the GPU'}: {str(error).partition('. ')[0]}",
            hint="further workers get more; ask for more with `gpu` to spare them the failed start",
        )
    user_errors.log(error, "the start failed:")
    text = user_errors.describe(error, starting.bundle_dir)
    if (
        isinstance(error, SyntaxError)
        and user_errors.where(error, starting.bundle_dir) != f"{error.filename}:{error.lineno}"
    ):
        return HandlerSyntax(text)
    hint = network_hint(error, starting.assign.spec.network) or files_hint(error)
    return StartFailed(text, hint=hint or "the traceback is in the function's log")


def out_of_device_memory(error: BaseException) -> bool:
    """True if torch found no memory on a GPU, wherever in a `load()` that surfaced."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "OutOfMemoryError", None) if torch is not None else None
    seen: BaseException | None = error
    while kind is not None and seen is not None:
        if isinstance(seen, kind):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _segment_error(error: Exception) -> FleetError | None:
    """The FleetError in a segment's failure, wherever in a `load()` it surfaced; None for other errors."""
    native = sys.modules.get("fleetstart.native")
    if native is not None and isinstance(error, native.SegmentFailed):
        code, message = error.args
        return error_from(ErrorInfo(code=code, message=message))
    return None
