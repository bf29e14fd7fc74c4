"""Choice of the engine that runs a language model, from its config.json, before anything is uploaded.

"auto" is the native engine if that can run the model: it starts soonest and runs as a pipeline. Otherwise it is the one
over transformers. An engine that is named is taken, or refused with its reason. Behind a `first` engine, which answers
until it is up, both must run the model. Over several devices (`tensor_parallel_size`) the native engine alone runs a
model, if its heads and widths divide among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import CheckpointInvalid, InvalidSpec
from ..function.spec import EngineName
from .causal_config import read_causal_config, require_transformers
from .decoder_config import read_config
from .quantization import require_vllm_method

EngineSetting = Literal["auto", "native", "transformers", "vllm"]
SETTINGS: tuple[EngineSetting, ...] = ("auto", "native", "transformers", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, and why it was chosen."""

    engine: EngineName
    reason: str


def engine_setting(value: object) -> EngineSetting:
    """The setting `engine` of an `LLM`. Errors: InvalidSpec."""
    for setting in SETTINGS:
        if value == setting:
            return setting
    raise InvalidSpec(f"engine={value!r} is none of {', '.join(map(repr, SETTINGS))}")


def choose_engine(
    setting: EngineSetting, config: bytes, first: object = "", tensor_parallel_size: int = 1
) -> EngineChoice:
    """The engine for a model with this config.json. Errors: CheckpointInvalid with the field that it cannot honour;
    InvalidSpec for a `first` or a size that does not go with it."""
    if tensor_parallel_size > 1:
        return _split(setting, config, first, tensor_parallel_size)
    if first:
        return _behind(setting, config, first)
    if setting != "auto":
        _CHECKS[setting](config)
        return EngineChoice(engine=setting, reason="as declared")
    try:
        slow = read_config(config).not_native
    except CheckpointInvalid as error:
        refused = error
    else:
        torch = f"; on a CPU with torch and not with its own kernels: {slow}" if slow else ""
        return EngineChoice(engine="native", reason="it runs this model and starts soonest" + torch)
    try:
        _check_transformers(config)
    except CheckpointInvalid as error:
        if error.message == refused.message:
            raise
        raise CheckpointInvalid(
            f"{error.message}; and for the native engine: {refused.message}", hint=error.hint
        ) from error
    return EngineChoice(engine="transformers", reason=f"the native engine refuses it: {refused.message}")


def _split(setting: EngineSetting, config: bytes, first: object, ranks: int) -> EngineChoice:
    if first or setting not in ("auto", "native"):
        named = f"first={first!r}" if first else f"engine={setting!r}"
        raise InvalidSpec(
            f"tensor_parallel_size={ranks}: the native engine splits a model over devices, and {named} names another",
            hint='leave out first and engine, or write engine="native"',
        )
    if reason := read_config(config).not_split(ranks):
        raise CheckpointInvalid(
            f"config.json: the model cannot be split over {ranks} devices: {reason}",
            hint="take a tensor_parallel_size that divides all of them",
        )
    return EngineChoice(engine="native", reason=f"it splits the model over {ranks} devices")


def _behind(setting: EngineSetting, config: bytes, first: object) -> EngineChoice:
    if first != "native":
        raise InvalidSpec(f"first={first!r} is not an engine that answers first", hint='write first="native"')
    if setting == "auto" or setting == "native":
        raise InvalidSpec(
            f'first="native" answers until another engine is up, and engine={setting!r} names none',
            hint='leave out first, or name the other engine: engine="vllm", first="native"',
        )
    _CHECKS[setting](config)
    try:
        read_config(config)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(
            f"the native engine cannot answer first: {error.message}",
            hint=f'leave out first="native": {setting} runs it',
        ) from error
    return EngineChoice(engine=setting, reason="as declared; the native engine answers until it is up")


def _check_native(config: bytes) -> None:
    try:
        read_config(config)
    except CheckpointInvalid as error:
        try:
            _check_transformers(config)
        except CheckpointInvalid:
            raise error from None
        raise CheckpointInvalid(error.message, hint='leave out engine="native": transformers may run it') from error


def _check_transformers(config: bytes) -> None:
    require_transformers(read_causal_config(config))


def _check_vllm(config: bytes) -> None:
    require_vllm_method(read_causal_config(config).quant_method)


_CHECKS: dict[EngineName, Callable[[bytes], None]] = {
    "native": _check_native,
    "transformers": _check_transformers,
    "vllm": _check_vllm,
}
