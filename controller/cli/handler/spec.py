"""Builds the FunctionSpec that the controller stores from a declaration and its overrides.

Defaults are decided here: the name from the attribute's, the fork server's profile from the bundle's imports,
memory and concurrency of a model from its kind. Flags win over the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.interface import Interface
from fleetstart.runtime.contract.function.spec import EngineName, FunctionSpec, LLMSettings, Scale
from fleetstart.runtime.contract.function.tasks import check_task
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, LayerId
from fleetstart.runtime.contract.node.devices import CPU_TYPE, REQUEST_MAX, DeviceRequest, parse_request
from fleetstart.runtime.contract.sizes import GIB, parse_size
from fleetstart.runtime.contract.weights.engine_choice import EngineSetting, engine_setting

from .source.declarations import Declaration

LLM_MEMORY_BYTES = 2 * GIB
"""KV cache, activations and torch itself; the weights are in the segment and not counted."""
TRANSFORMERS_MEMORY_BYTES = 2 * GIB
"""Activations, torch and transformers."""
TORCH_BASED = frozenset({"torch", "transformers", "sentence_transformers", "torchvision", "torchaudio", "diffusers"})
"""Packages that import torch."""
TRANSFORMERS_BASED = frozenset({"transformers", "sentence_transformers"})
"""Packages that import transformers."""
LAYERED_CONCURRENCY = 8
"""Calls given to a model in layers: enough that each of four stages has one while others are read and answered."""
BATCH_QUEUE_FACTOR = 2
"""Calls given to a batched handler for each place in its batch: while one is computed, the next one gathers."""
CONCURRENCY_MAX = 1000
MODEL_RETRIES = 2
"""Calls of a language model or of a model in layers run again if a worker was lost: they compute, and a pipeline starts
them anew in any case when it loses a stage."""
LLM_QUEUE_FACTOR = 2
"""Calls given to an engine for each place in its batch: when one ends, the next is there already."""

Spec = TypeVar("Spec", FunctionSpec, LLMSettings)

_SAME = (
    "concurrency", "timeout_s", "retries", "queue_timeout_s", "start_timeout_s", "scale", "slo", "limits", "network",
    "isolation", "env", "tags", "probe", "schedule", "timezone", "keep_requests", "project", "secrets", "volumes",
    "keep", "image",
)  # fmt: skip
_READ: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "memory": ("memory_bytes", parse_size),
    "max_body": ("max_body_bytes", parse_size),
    "gpu": ("gpu", parse_request),
    "cors": ("cors", lambda value: ["*"] if value == "*" else value),
    "region": ("region", lambda value: [value] if isinstance(value, str) else value),
}
"""Settings that people write otherwise than the spec has them: its field, and how it is read."""
_ENGINE = {
    "first": "first",
    "dtype": "dtype",
    "max_batch": "max_batch",
    "max_context": "max_context_tokens",
    "threads": "threads",
    "tensor_parallel_size": "tensor_parallel_size",
}

_PRELOADS: dict[EngineName, str] = {"transformers": "transformers", "vllm": "vllm"}
"""Libraries of engines that take seconds to import."""


def default_name(attribute: str) -> str:
    """ "MiniLMEmbed" and "mini_lm_embed" → "mini-lm-embed"."""
    words = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1-\2", attribute)
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1-\2", words)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


PRELOADED = frozenset({"numpy", "tokenizers", "torch", "transformers"})
"""Modules that workers of the profile "torch" hold: a second version of one with native code cannot be loaded."""


def profile_of(declaration: Declaration, imports: Collection[str], modules: Collection[str] = ()) -> str:
    """The fork server's profile. `modules`: those of its layer, of which it needs its own."""
    if not PRELOADED.isdisjoint(modules):
        return "python"
    return "torch" if declaration.kind != "function" or not TORCH_BASED.isdisjoint(imports) else "python"


def preload_of(declaration: Declaration, imports: Collection[str], modules: Collection[str] = ()) -> str:
    """The library that a node should have imported before it forks the function's workers; "" for none.

    A function with packages of its own gets none: a library imports many, in the node's versions.
    """
    if modules:
        return ""
    based = declaration.kind == "transformers" or not TRANSFORMERS_BASED.isdisjoint(imports)
    return "transformers" if based else ""


def build_spec(
    declaration: Declaration,
    *,
    module: str,
    bundle: BundleId,
    weights: CheckpointId | None,
    imports: Collection[str],
    overrides: Mapping[str, Any],
    adapter: CheckpointId | None = None,
    adapters: Mapping[str, CheckpointId] | None = None,
    layer: LayerId | None = None,
    modules: Collection[str] = (),
    interface: Interface | None = None,
    batch: int = 0,
    engine: EngineName | None = None,
) -> FunctionSpec:
    """Builds the spec of one function. `batch`: calls that a batched handler computes at once, or 0; `modules`: those
    of its layer; `engine`: the one that was chosen for a language model's weights, None if they were not read.

    Errors: InvalidSpec, naming the setting.
    """
    settings = {**declaration.settings, **overrides}
    fields: dict[str, Any] = {
        "name": FunctionName(settings.get("name") or default_name(declaration.attribute)),
        "bundle": bundle,
        "entry": f"{module}:{declaration.attribute}",
        "profile": profile_of(declaration, imports, modules),
        "preload": preload_of(declaration, imports, modules),
        "layer": layer,
        "weights": weights,
        "adapter": adapter,
        "adapters": adapters or {},
        "interface": interface,
        **{key: settings[key] for key in _SAME if key in settings},
    }
    if isinstance(declaration.settings.get("scale"), Scale) and isinstance(overrides.get("scale"), Mapping):
        fields["scale"] = {**msgspec.to_builtins(declaration.settings["scale"]), **overrides["scale"]}
    fields |= {field: read(settings[key]) for key, (field, read) in _READ.items() if key in settings}
    if "calls" in settings:
        fields["calls"] = _calls(declaration, settings["calls"])
    if declaration.kind == "llm":
        llm = _llm_settings(settings, engine or _named_engine(declaration))
        fields |= {"llm": llm, "preload": "" if modules else _PRELOADS.get(llm.engine, "")}
        if llm.tensor_parallel_size > 1:
            fields.setdefault("gpu", DeviceRequest(count=llm.tensor_parallel_size))
        fields.setdefault("memory_bytes", LLM_MEMORY_BYTES)
        fields.setdefault("retries", MODEL_RETRIES)
        fields.setdefault("concurrency", llm.max_batch * LLM_QUEUE_FACTOR)
    if declaration.kind == "transformers":
        fields.setdefault("memory_bytes", TRANSFORMERS_MEMORY_BYTES)
        fields.setdefault("concurrency", check_task(dict(declaration.settings)).concurrency)
    if batch:
        fields.setdefault("concurrency", min(CONCURRENCY_MAX, batch * BATCH_QUEUE_FACTOR))
    if declaration.kind == "layered":
        fields["layered"] = True
        fields.setdefault("retries", MODEL_RETRIES)
        fields.setdefault("concurrency", LAYERED_CONCURRENCY)
    return _checked(fields, FunctionSpec)


def engine_of(declaration: Declaration) -> EngineSetting:
    """The setting `engine` of a language model. Errors: InvalidSpec."""
    return engine_setting(declaration.settings.get("engine", "auto"))


def first_of(declaration: Declaration) -> object:
    """The setting `first` of a language model: the engine that answers until the other one is up."""
    return declaration.settings.get("first", "")


def tensor_parallel_of(declaration: Declaration) -> int:
    """The setting `tensor_parallel_size` of a language model. Errors: InvalidSpec."""
    size = declaration.settings.get("tensor_parallel_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= REQUEST_MAX:
        raise InvalidSpec(f"tensor_parallel_size={size!r} is no number of devices from 1 to {REQUEST_MAX}")
    return size


def _named_engine(declaration: Declaration) -> EngineName:
    """The engine that a declaration names, for one whose weights are not read: "auto" begins with the native one."""
    setting = engine_of(declaration)
    return "native" if setting == "auto" else setting


def _llm_settings(settings: Mapping[str, Any], engine: EngineName) -> LLMSettings:
    """Settings of a language model. Another engine than ours, and a GPU, compute in the dtype of the weights unless
    told, since they would have to copy them. On a GPU keys and values have what the weights leave, unless told."""
    fields = {field: settings[key] for key, field in _ENGINE.items() if key in settings}
    on_gpu = "gpu" in settings and parse_request(settings["gpu"]).type != CPU_TYPE
    if settings.get("kv_memory", "auto") != "auto":
        fields["kv_memory_bytes"] = parse_size(settings["kv_memory"])
    elif "kv_memory" in settings or on_gpu:
        fields["kv_memory_bytes"] = 0
    if engine != "native" or on_gpu:
        fields.setdefault("dtype", "auto")
    return _checked({**fields, "engine": engine}, LLMSettings)


def _calls(declaration: Declaration, calls: Any) -> Any:
    if declaration.kind == "transformers":
        raise InvalidSpec(
            f"{declaration.attribute}: a Transformers has no code that could call other functions",
            hint="leave out calls, or call both from a function of its own",
        )
    return [calls] if isinstance(calls, str) else calls


def weights_of(declaration: Declaration) -> str | None:
    return _path(declaration, "weights")


def layer_pattern_of(declaration: Declaration) -> str:
    """Pattern of the layers' tensor names; "" for the usual ones. Errors: InvalidSpec."""
    layers = declaration.settings.get("layers", "")
    if not isinstance(layers, str) or ("layers" in declaration.settings and "{}" not in layers):
        raise InvalidSpec(
            f"layers={layers!r} does not say how the layers' tensors are named",
            hint='write the beginning of their names, with {} for the number: layers="features.{}"',
        )
    return layers


def adapter_of(declaration: Declaration) -> str | None:
    """Path of the adapter, if there is one. Errors: InvalidSpec, also for an adapter without weights."""
    adapter = _path(declaration, "adapter")
    if adapter is not None and weights_of(declaration) is None:
        raise InvalidSpec(
            f"adapter={adapter!r} needs the weights that it adapts",
            hint='write weights="./base" beside adapter="./lora"',
        )
    return adapter


def adapters_of(declaration: Declaration) -> dict[str, str]:
    """Paths of the named adapters. Errors: InvalidSpec for what are no names and paths."""
    adapters = declaration.settings.get("adapters", {})
    if isinstance(adapters, Mapping) and all(
        isinstance(name, str) and isinstance(path, str) and path for name, path in adapters.items()
    ):
        return dict(adapters)
    raise InvalidSpec(f"adapters={adapters!r} are no names with paths", hint='write adapters={"sql": "./sql"}')


def _path(declaration: Declaration, setting: str) -> str | None:
    path = declaration.settings.get(setting)
    if path is None or (isinstance(path, str) and path):
        return path
    raise InvalidSpec(f"{setting}={path!r} is not a path", hint=f'write {setting}="./{setting}"')


def include_of(declaration: Declaration) -> list[str]:
    include = declaration.settings.get("include", [])
    if isinstance(include, list) and all(isinstance(pattern, str) and pattern for pattern in include):
        return include
    raise InvalidSpec(f"include={include!r} is not a list of patterns", hint='write include=["data/*.json"]')


def module_name(file: PurePath) -> str:
    """Module name of a file at the bundle's root. Errors: InvalidSpec."""
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise InvalidSpec(
            f"{file.name} cannot be imported as a module",
            hint="rename it to letters, digits and _ with the suffix .py, for example handler.py",
        )
    return file.stem


def _checked(fields: dict[str, Any], kind: type[Spec]) -> Spec:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except InvalidSpec:
        raise
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, InvalidSpec):
            raise cause from error
        message = (
            str(error)
            .replace("`$.", "`")
            .replace("memory_bytes", "memory")
            .replace("max_body_bytes", "max_body")
            .replace("max_context_tokens", "max_context")
        )
        raise InvalidSpec(f"{fields.get('name', 'llm')}: {message[0].lower()}{message[1:]}") from error
