"""How a handler says what it is: `@function(...)`, `app = function(...)(asgi_app)`, `chat = LLM(...)`.

A declaration only keeps its settings. The deploy reads the same literals from the source without running
it, and the worker runs what the entry names; so a declared function, class or app stays exactly what it
was, and a test can call it as if nothing had been declared.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..contract.function.spec import SLO, Isolation, Limits, Scale

Target = TypeVar("Target")

GENERAL = (
    "name", "weights", "adapter", "memory", "scale", "concurrency", "timeout_s", "queue_timeout_s", "start_timeout_s",
    "slo", "limits", "max_body", "cors", "network", "isolation", "region", "env", "tags", "include", "probe",
    "schedule", "timezone", "keep_requests", "project", "secrets",
)  # fmt: skip
"""Settings that every declaration takes."""
OF_LAYERED = ("layers",)
"""Settings that only a `Layered` class takes."""
OF_LLM = ("dtype", "max_batch", "max_context", "kv_memory", "threads")
"""Settings that only an LLM takes."""
ATTRIBUTE = "__fleetstart__"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The settings as they were written; what is not there was not said."""

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
    queue_timeout_s: float = ...,
    limits: Limits = ...,
    max_body: str | int = ...,
    cors: str | Iterable[str] = ...,
    start_timeout_s: float = ...,
    network: bool | Iterable[str] = ...,
    isolation: Isolation = ...,
    region: str | Iterable[str] = ...,
    env: Mapping[str, str] = ...,
    tags: Mapping[str, str] = ...,
    include: Iterable[str] = ...,
    layers: str = ...,
    probe: str = ...,
    schedule: str = ...,
    timezone: str = ...,
    keep_requests: bool = ...,
    project: str = ...,
    secrets: Iterable[str] = ...,
) -> Callable[[Target], Target]: ...


def function(target: Any = None, /, **settings: Any) -> Any:
    """Declares a function, a class with `__call__` (and `load(self, weights)`, once a worker), or an ASGI app.

    Errors: TypeError for a setting that does not exist, and for a target that cannot be called.
    """
    check_names("function", settings, (*GENERAL, *OF_LAYERED))
    if target is None:
        return lambda declared: _declare(declared, settings)
    return _declare(target, settings)


def _declare(target: Any, settings: Mapping[str, Any]) -> Any:
    if not callable(target):
        raise TypeError(f"function() declares something that can be called, got {type(target).__name__} {target!r}")
    if "layers" in settings and not (isinstance(target, type) and issubclass(target, Layered)):
        raise TypeError(f"layers={settings['layers']!r} is of a class that is Layered, and {target!r} is none")
    # What has no room for an attribute (an app with __slots__) is served all the same: the entry names it.
    if hasattr(target, "__dict__"):
        setattr(target, ATTRIBUTE, Declaration(dict(settings)))
    return target


class Layered:
    """A model that is a row of layers, so that several servers can start it as a pipeline.

        @function(weights="./weights", layers="features.{}", memory="1GiB")
        class Classify(Layered):
            def load(self, weights): ...             # what before() and after() need
            def layer(self, weights, index): ...     # the index-th layer: something that is called with activations
            def before(self, image: bytes): ...      # a request's input -> activations
            def after(self, activations): ...        # activations -> its answer

    Layers are numbered by their tensors' names (`blocks.3.conv.weight`); where these are unusual, `layers` says how
    they begin, with `{}` for a number. Activations are one numpy array or torch tensor, or a dict of such; between two
    servers they travel, and arrive contiguous and in the host's memory.

    A worker with the whole model calls all of it. In a pipeline the first stage has load(), before(), after() and its
    share of the layers; each other stage has layers alone, and never calls load(). Layers of one worker are called by
    one thread at a time, `before` and `after` by as many as the function's `concurrency`. A call whose stage was lost
    begins anew with `before`, on the whole model.
    """

    def load(self, weights: Any) -> None:
        """Once, wherever calls come to. `weights` as of a handler class: name -> tensor, streamed, zero-copy."""

    def layer(self, weights: Any, index: int) -> Callable[[Any], Any]:
        raise NotImplementedError(f"{type(self).__name__} has no layer(self, weights, index)")

    def after(self, activations: Any) -> Any:
        """The answer; as of a handler's `__call__`. Without one of your own, the activations are."""
        return activations

    if TYPE_CHECKING:
        before: Callable[..., Any]


class LLM:
    """A model that the platform's own engine runs: `chat = LLM(weights="./weights", memory="1GiB")`.

    Errors: TypeError for a setting that does not exist, and without weights.
    """

    def __init__(self, **settings: Any) -> None:
        check_names("LLM", settings, (*GENERAL, *OF_LLM))
        if "weights" not in settings:
            raise TypeError('LLM() needs weights, for example LLM(weights="./weights")')
        self.__fleetstart__ = Declaration(dict(settings))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.__fleetstart__.settings

    def __repr__(self) -> str:
        return f"LLM({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def check_names(what: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for the first name that is not known, with the nearest one that is."""
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{what}() has no setting {name!r}: {advice}")
