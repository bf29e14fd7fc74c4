"""Declarations of functions: `@function(...)`, `app = function(...)(asgi_app)`, `chat = LLM(...)`, `moods =
Transformers(...)`.

A declaration only stores its settings. The deploy reads the same literals from the source without running it, and the
worker runs the entry; so a declared function, class or app stays unchanged, and a test can call it directly.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..contract.function.spec import SLO, Isolation, Keep, Limits, Scale
from ..contract.function.tasks import check_task

Target = TypeVar("Target")

GENERAL = (
    "name", "weights", "adapter", "memory", "scale", "concurrency", "timeout_s", "retries", "queue_timeout_s",
    "start_timeout_s", "slo", "limits", "max_body", "cors", "network", "isolation", "region", "env", "tags", "include",
    "probe", "schedule", "timezone", "keep_requests", "project", "secrets", "keep", "gpu", "image",
)  # fmt: skip
"""Settings of every declaration."""
OF_CODE = ("requirements", "calls", "volumes")
"""Settings of functions with code of their own, which an `LLM` has not."""
OF_LAYERED = ("layers",)
"""Settings of a `Layered` class only."""
OF_LLM = (
    "engine", "first", "dtype", "max_batch", "max_context", "kv_memory", "threads", "tensor_parallel_size",
    "adapters",
)  # fmt: skip
"""Settings of an `LLM` only."""
OF_TRANSFORMERS = ("task", "max_tokens", "pooling", "normalize")
"""Settings of a `Transformers` only."""
ATTRIBUTE = "__fleetstart__"


@dataclass(frozen=True, slots=True)
class Declaration:
    """Settings as written; a missing one has its default."""

    settings: Mapping[str, Any]


@overload
def function(target: Callable[..., Any], /) -> Callable[..., Any]: ...
@overload
def function(
    *,
    name: str = ...,
    weights: str = ...,
    adapter: str = ...,
    memory: str | int = ...,
    scale: Scale = ...,
    slo: SLO = ...,
    concurrency: int = ...,
    timeout_s: float = ...,
    retries: int = ...,
    queue_timeout_s: float = ...,
    limits: Limits = ...,
    max_body: str | int = ...,
    cors: str | Iterable[str] = ...,
    start_timeout_s: float = ...,
    network: bool | Iterable[str] = ...,
    isolation: Isolation = ...,
    image: str = ...,
    region: str | Iterable[str] = ...,
    env: Mapping[str, str] = ...,
    tags: Mapping[str, str] = ...,
    include: Iterable[str] = ...,
    layers: str = ...,
    probe: str = ...,
    schedule: str = ...,
    timezone: str = ...,
    keep_requests: bool = ...,
    keep: Keep = ...,
    gpu: str | int = ...,
    project: str = ...,
    secrets: Iterable[str] = ...,
    requirements: str | Iterable[str] = ...,
    calls: str | Iterable[str] = ...,
    volumes: Iterable[str] = ...,
) -> Callable[[Target], Target]: ...


def function(target: Any = None, /, **settings: Any) -> Any:
    """Declares a function, a class or an ASGI app as a deployable function. It stays callable as it is.

        @function
        def greet(name: str = "you") -> str: ...

        @function(weights="./weights", memory="2GiB", concurrency=4)
        class Embed:
            def load(self, weights): ...          # once a worker, before its first call
            def __call__(self, text: str) -> list[float]: ...

        app = function(timeout_s=10)(Starlette(routes=...))

    A class may also have `warm()`, called after `load`, and `close()`, called before the worker ends. Parameters are
    the fields of a JSON body, a form or the query; annotations are validated. A generator streams its items as
    server-sent events. Every setting must be a literal, since the deploy reads it without running the file.

    Args:
        name: Name of the function, 1 to 63 of `a-z`, `0-9` and `-`. Default: the declared name.
        weights: Folder or URL of a checkpoint (safetensors), passed to `load`.
        adapter: Folder or URL of a LoRA adapter that is applied to the weights.
        memory: Limit on a worker's own memory, for example `"512MiB"`, the default. Weights are not counted.
        scale: Number of workers and how long an idle one is kept, see `Scale`.
        slo: Target times that starts are planned for, see `SLO`.
        concurrency: Calls that one worker serves at a time, 1 to 1000. Default 1.
        timeout_s: Longest time of one call in seconds, waiting included. Default 300.
        retries: How often a call is run again, on another worker, after its worker died under it, 0 to 10. Default 0.
        queue_timeout_s: Longest time that a call waits for a worker, in seconds. Default: `timeout_s`.
        start_timeout_s: Longest time that a worker takes to start, in seconds. Default 120.
        limits: Rate and concurrency limits of all callers together, see `Limits`.
        max_body: Largest request body, for example `"1MiB"`. Default: the gateway's limit.
        cors: Origins that may call from a browser, or `"*"`. Default: none.
        network: False for no network, the default; True for the node's; or a list of hosts that may be reached.
        isolation: `"namespaces"`, the default, `"gvisor"` or `"container"`.
        image: Image of its containers, for example `"app:1.2"`, on the nodes' engines. Needs `isolation="container"`.
        region: Regions in which workers may run. Default: any.
        env: Environment variables of the workers.
        secrets: Names of the project's secrets, set as environment variables.
        tags: Labels on the ledger's rows, for example `{"team": "search"}`.
        include: Further files for the bundle, as glob patterns.
        layers: Name pattern of a `Layered` model's layers, for example `"blocks.{}"`.
        probe: Path that must answer 2xx before a new version receives calls, for example `"/healthz"`.
        schedule: Cron expression of five fields at which the live version is invoked.
        timezone: Time zone of the schedule, for example `"Europe/Berlin"`. Default: UTC.
        keep_requests: True to store requests of synchronous calls for a day, for `fs replay`.
        keep: `"host"`: one copy of the weights is kept in the memory of some node, also while no worker uses them.
        gpu: Devices of each worker: `1`, `"H100"`, `"H100:2"`, or a share of one by memory, `"24GiB"`.
        project: Project of the function. Default: that of the key, or `default`.
        requirements: Packages to install for it, for example `["scikit-learn==1.7"]`, or the name of a file with them.
        calls: Functions that the handler may call with `call` and `acall`, for example `["embed"]`. Default: none.
        volumes: Folders of the store that workers see, for example `["index", "models@2", "cache:rw"]`, see `volume`.

    Raises:
        TypeError: For an unknown setting, and for a target that cannot be called.
    """
    check_names("function", settings, (*GENERAL, *OF_CODE, *OF_LAYERED))
    if target is None:
        return lambda declared: _declare(declared, settings)
    return _declare(target, settings)


def _declare(target: Any, settings: Mapping[str, Any]) -> Any:
    if not callable(target):
        raise TypeError(f"function() declares something that can be called, got {type(target).__name__} {target!r}")
    if "layers" in settings and not (isinstance(target, type) and issubclass(target, Layered)):
        raise TypeError(f"layers={settings['layers']!r} needs a Layered class, got {target!r}")
    # An object without attributes of its own (an app with __slots__) is served all the same: the entry names it.
    if hasattr(target, "__dict__"):
        setattr(target, ATTRIBUTE, Declaration(dict(settings)))
    return target


class Layered:
    """Base class of a model made of consecutive layers, which several workers can start and run as a pipeline.

        @function(weights="./weights", layers="features.{}", memory="1GiB")
        class Classify(Layered):
            def load(self, weights): ...             # tensors of before() and after()
            def layer(self, weights, index): ...     # the index-th layer: a callable of activations
            def before(self, image: bytes): ...      # request input -> activations
            def after(self, activations): ...        # activations -> result

    Layers are numbered by their tensors' names (`blocks.3.conv.weight`); the setting `layers` gives an unusual prefix,
    with `{}` for the number. Activations are one numpy array or torch tensor, or a dict of them; sent between two
    workers they arrive contiguous and in host memory.

    A worker with the whole model calls all methods. In a pipeline the first stage calls `load`, `before`, `after` and
    its share of the layers; the other stages only layers, and never `load`. The layers of one worker are called by one
    thread at a time, `before` and `after` by up to `concurrency` threads. A call whose stage was lost is retried from
    `before`, on the whole model. All methods are synchronous.
    """

    def load(self, weights: Any) -> None:
        """Loads the tensors that `before` and `after` need, once, on the worker that receives calls.

        Args:
            weights: Mapping of names to tensors, as for a handler class: zero-copy, each available once it arrived.
        """

    def layer(self, weights: Any, index: int) -> Callable[[Any], Any]:
        """Returns layer `index` (from 0) as a callable of activations, for example a torch module. Required."""
        raise NotImplementedError(f"{type(self).__name__} has no layer(self, weights, index)")

    def after(self, activations: Any) -> Any:
        """Returns the result of a call, as a handler's `__call__` does. Default: the activations."""
        return activations

    if TYPE_CHECKING:
        before: Callable[..., Any]
        """Returns the activations for a request; its parameters are the input, as of a handler. Required."""


class LLM:
    """A language model that is served with OpenAI-compatible routes, by the platform's engine or another one.

        chat = LLM(weights="./weights", memory="1GiB", max_batch=16, max_context=4096)

    Routes: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/models`, and `POST /` with a `prompt` or
    `messages`.
    """

    def __init__(self, **settings: Any) -> None:
        """Declares the model. Every setting must be a literal; those of `function` are taken, too.

        Args:
            **settings: `weights` (required): folder or URL of a checkpoint with its tokenizer. `engine`: `"native"`,
                `"transformers"`, `"vllm"` or `"auto"`, the default: native if that can run the model, else
                transformers. `first="native"`: the native engine answers until the named one is up. `dtype`:
                arithmetic, `"fp32"`, `"bf16"`, `"fp16"` or `"auto"`, that of the weights; default: `"fp32"` for the
                native engine without `gpu`, else `"auto"`. `max_batch`: sequences a step, 1 to 256, default 8.
                `max_context`: tokens of prompt and answer, default 2048. `kv_memory`: memory of the KV cache, or
                `"auto"`: what the weights leave of its share of a GPU; default: `"auto"` with `gpu`, else `"256MiB"`.
                `threads`: CPU threads, default all of the worker's cores. `tensor_parallel_size`: devices of one node
                that each layer is split over, default 1. `adapters`: folders or URLs of LoRA adapters by name, for
                example `{"sql": "./sql"}`: a request chooses one as its `model`.

        Raises:
            TypeError: For an unknown setting, and without weights.
        """
        check_names("LLM", settings, (*GENERAL, *OF_LLM))
        if "weights" not in settings:
            raise TypeError('LLM() needs weights, for example LLM(weights="./weights")')
        self.__fleetstart__ = Declaration(dict(settings))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings as written."""
        return self.__fleetstart__.settings

    def __repr__(self) -> str:
        return f"LLM({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


class Transformers:
    """A model of Hugging Face transformers that is served for one task, from a folder that `save_pretrained` wrote.

        moods = Transformers(weights="./weights", task="text-classification", memory="2GiB")

    Tasks: `text-classification`, `embedding`, `reranking`, `automatic-speech-recognition`, `image-classification`.
    """

    def __init__(self, **settings: Any) -> None:
        """Declares the model. Every setting must be a literal; those of `function` are taken, too.

        Args:
            **settings: `weights` (required): folder or URL of a checkpoint with its config and tokenizer. `task`
                (required). `max_tokens`: longest text, default the model's. For an embedding, `pooling`: `"mean"`
                (default), `"cls"` or `"last"`; `normalize`: whether vectors have length one, default True.
                `requirements`: packages to install for it, for example `["transformers==5.23.0"]`.

        Raises:
            TypeError: For an unknown setting, and without weights.
            InvalidSpec: For an unknown task, or a setting of another one.
        """
        check_names("Transformers", settings, (*GENERAL, *OF_CODE, *OF_TRANSFORMERS))
        if "weights" not in settings:
            raise TypeError('Transformers() needs weights, for example Transformers(weights="./weights", task=...)')
        check_task(settings)
        self.__fleetstart__ = Declaration(dict(settings))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings as written."""
        return self.__fleetstart__.settings

    def __repr__(self) -> str:
        return f"Transformers({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def check_names(what: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Checks setting names. Errors: TypeError for the first unknown one, with the nearest known one."""
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{what}() has no setting {name!r}: {advice}")
