"""Reading a LoRA adapter in PEFT's format: which tensors of the base it changes, by what, and how much.

Nothing here touches a tensor: names, shapes and adapter_config.json decide. A module's weight becomes
W + scale · B A (Hu et al., LoRA, 2021, section 4.1), scale = alpha / r, or alpha / √r where the adapter says rslora
(Kalajdzievski, 2023). What is not a pair of such matrices is a whole tensor that stands in for the base's
(`modules_to_save`, biases). Kinds of adapters that change more than that are refused by name: half an adapter
would answer, and wrongly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.manifest import TensorEntry
from fleetstart.runtime.tensors import Tensors, unknown

CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
_ADAPTABLE = {"F16", "BF16", "F32", "F64"}
"""What B A can be added to as it is stored; 8-bit floats have scales beside them that this knows nothing of."""
_REFUSED = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that take something out of the base's weights, which the published base still has."""
_MERGE = "merge it into the base (PEFT's merge_and_unload) and deploy the result"
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

Number = TypeVar("Number", int, float)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of adapter_config.json, what changes the numbers."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is added to one matrix: scale · B A, its transpose if the base stores [in, out].

    Shapes:  the tensors that `a` and `b` name in the adapter are [r, in] and [out, r].
    """

    a: str
    b: str
    scale: float
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """By the base's names: matrices with something added, and tensors that the adapter has whole.

    One may be both: PEFT saves a head that it adapts beside its two small matrices.
    """

    deltas: dict[str, Delta]
    whole: dict[str, str]


def read_config(data: bytes) -> LoraConfig:
    """Errors: CheckpointInvalid if it is not LoRA, or does what cannot be done to weights alone."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.convert(fields, LoraConfig)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(f"{CONFIG_FILE} is not a LoRA adapter's: {error}") from error
    if config.peft_type != "LORA":
        raise CheckpointInvalid(f"{CONFIG_FILE}: peft_type is {config.peft_type!r}, only LORA is applied")
    used = [name for name in _REFUSED if fields.get(name)]
    if used:
        raise CheckpointInvalid(f"{CONFIG_FILE}: {used[0]} is not applied here", hint=_MERGE)
    start = str(config.init_lora_weights).lower()
    if start.startswith(_REWRITES_BASE):
        raise CheckpointInvalid(
            f"{CONFIG_FILE}: init_lora_weights {start!r} belongs to a base with other weights than the published one",
            hint="save it with path_initial_model_for_weight_conversion, which makes it an ordinary LoRA",
        )
    if config.r < 1 or any(rank < 1 for rank in (config.rank_pattern or {}).values()):
        raise CheckpointInvalid(f"{CONFIG_FILE}: a rank must be at least 1")
    return config


def changes(config: LoraConfig, adapter: Tensors, base: Tensors) -> Changes:
    """Errors: CheckpointInvalid, naming the tensor that the base lacks, that is of another shape, or is half a pair."""
    pairs: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for name in adapter:
        bare = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        if matrix := _MATRIX.fullmatch(bare):
            pairs.setdefault(matrix["module"], {})[matrix["side"]] = name
        elif "lora_" in bare or "trainable_tokens" in bare:
            raise CheckpointInvalid(f"the adapter's {name} is of a kind that is not applied here", hint=_MERGE)
        else:
            whole[_whole(config, bare, base)] = name
    deltas = {}
    for module, sides in pairs.items():
        target = f"{module}.weight"
        stored = adapter.entry(whole[target]) if target in whole else _target(target, base)
        deltas[target] = _delta(config, module, sides, adapter, stored)
    return Changes(deltas=deltas, whole=whole)


def _delta(config: LoraConfig, module: str, sides: Mapping[str, str], adapter: Tensors, stored: TensorEntry) -> Delta:
    if len(sides) < 2:
        raise CheckpointInvalid(f"the adapter has {next(iter(sides.values()))} without the matrix that belongs to it")
    a, b = adapter.entry(sides["A"]).shape, adapter.entry(sides["B"]).shape
    rank = config.rank(module)
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        raise CheckpointInvalid(
            f"the adapter's matrices of {module} are {list(a)} and {list(b)}, its config says rank {rank}"
        )
    changed = (a[1], b[0]) if config.fan_in_fan_out else (b[0], a[1])
    if stored.shape != changed:
        raise CheckpointInvalid(
            f"the adapter changes a matrix {list(changed)}, the base's {module}.weight is {list(stored.shape)}"
        )
    if stored.dtype not in _ADAPTABLE:
        raise CheckpointInvalid(
            f"the base's {module}.weight is {stored.dtype}; an adapter needs one of {sorted(_ADAPTABLE)}"
        )
    return Delta(a=sides["A"], b=sides["B"], scale=config.scale(module), transposed=config.fan_in_fan_out)


def _whole(config: LoraConfig, name: str, base: Tensors) -> str:
    """A new name is allowed to modules that the adapter says it saves: a classifier that the base never had."""
    if not any(f".{module}." in f".{name}" for module in config.modules_to_save or ()):
        _target(name, base)
    return name


def _target(name: str, base: Tensors) -> TensorEntry:
    try:
        return base.entry(name)
    except KeyError as error:
        raise CheckpointInvalid(
            f"the adapter changes {name}, which the base does not have: {unknown('tensor', name, base).args[0]}",
            hint="is it the adapter of another model?",
        ) from error


def _by_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    """PEFT's rule: the first pattern that matches the module's name or its end behind a dot."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise CheckpointInvalid(f"{CONFIG_FILE}: pattern {pattern!r} is no regular expression: {error}") from error
    return otherwise
