"""LoRA adapters in PEFT's format: what can be applied, to which tensors, and by how much.

PEFT names the factors of a module `base_model.model.{module}.lora_A.weight`, [r, in], and `lora_B`, [out, r]. The
module's weight in the base becomes W + scale · B A (Hu et al., LoRA, 2021, section 4.1), scale = alpha / r, or
alpha / √r where the adapter says rslora (Kalajdzievski, 2023). Tensors of other names stand in for the base's
(`modules_to_save`, biases). What changes more than that is refused by name: half an adapter would answer, and wrongly.

Names, dtypes and shapes tell all of this, and no tensor is touched. So a push refuses what no worker could apply, a
deploy what does not fit its base, and the worker that applies it decides by the same rules.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ..decoding import UNDECODABLE
from ..errors import CheckpointInvalid, InvalidSpec
from ..ids import FunctionName
from .manifest import Manifest

CONFIG = "adapter_config.json"
CONFIG_MAX_BYTES = 1 << 20
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
WRAPPED = ".base_layer."
"""Infix between a module and its parameter, where the adapter replaces the parameter and wraps its module."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that B A can be added to as stored; 8-bit floats have scales of their own, which are not supported."""

MUST_BE_OFF = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Settings of PEFT's LoraConfig with which an adapter is more than products of factors and whole tensors."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the base's weights, which the published base still has."""
_BIASES = ("none", "all", "lora_only")
_ALL_LINEAR = "all-linear"
_MERGE = "merge it into its base with PEFT's merge_and_unload() and push the whole model"
_ANOTHER = "was the adapter trained on another model?"
_NEAREST_OF = 500
"""Names that are compared to find the nearest, of 256 characters at most: a deploy waits for it."""

Number = TypeVar("Number", int, float)


class Shaped(Protocol):
    """A tensor's dtype, by its safetensors name, and shape, as in a manifest's `TensorEntry`."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of adapter_config.json that decide whether an adapter fits and what it adds."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    """Ends of modules' names, or a regular expression of whole ones."""
    use_rslora: bool | None = False
    fan_in_fan_out: bool | None = False
    """True if the base stores its matrices as [in, out], as GPT-2 does."""
    modules_to_save: list[str] | None = None
    """Ends of names of modules that the adapter has whole, and may have alone."""
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """The rank r for a module. Errors: CheckpointInvalid for a pattern that is no regular expression."""
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """The scale of B A for a module. Errors: as `rank`."""
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def saves(self, tensor: str) -> bool:
        """Checks whether the tensor belongs to a module that the base may lack, such as a classifier."""
        return any(f".{module}." in f".{tensor}" for module in self.modules_to_save or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The factors of one module, by their names in the adapter.

    Shapes:  a [r, in], b [out, r]; `made` is their product's as the base stores it: [out, in], or [in, out].
    """

    a: str
    b: str
    made: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedTensor:
    """A tensor that stands in for the base's, by its name in the adapter."""

    name: str
    tensor: Shaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The changes of an adapter to its base. A tensor may be both replaced and adapted: PEFT saves an adapted head
    so."""

    config: LoraConfig
    pairs: Mapping[str, Pair]
    """Factor pairs by the name of the module in the base."""
    whole: Mapping[str, ReplacedTensor]
    """Replaced tensors by their name in the base."""


def read_config(data: bytes) -> LoraConfig:
    """Parses adapter_config.json. Errors: CheckpointInvalid, naming the setting that cannot be applied."""
    if len(data) > CONFIG_MAX_BYTES:
        raise CheckpointInvalid(f"{CONFIG} has {len(data)} bytes, {CONFIG_MAX_BYTES} at most")
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        config = msgspec.json.decode(data, type=LoraConfig)
        used = [name for name in MUST_BE_OFF if name in fields and msgspec.json.decode(fields[name])]
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"{CONFIG} is not a LoRA adapter's: {error}") from error
    if config.peft_type != "LORA":
        raise CheckpointInvalid(f"{CONFIG}: peft_type is {config.peft_type[:40]!r}, and only LORA can be applied")
    if used:
        raise CheckpointInvalid(f"{CONFIG}: {used[0]} is not applied here", hint=_MERGE)
    for name, rank in [("r", config.r), *(config.rank_pattern or {}).items()]:
        if rank < 1:
            raise CheckpointInvalid(f"{CONFIG}: a rank must be at least 1, {name[:80]} is {str(rank)[:20]}")
    if not config.target_modules:
        raise CheckpointInvalid(f"{CONFIG}: target_modules names no module")
    if config.bias not in _BIASES:
        raise CheckpointInvalid(f"{CONFIG}: bias is {config.bias[:40]!r}; none, all and lora_only are known")
    begun = str(config.init_lora_weights).lower()
    if begun.startswith(CHANGES_BASE):
        raise CheckpointInvalid(
            f"{CONFIG}: init_lora_weights {begun[:40]!r} belongs to a base with other weights than were published",
            hint="save it with path_initial_model_for_weight_conversion, which makes it an ordinary LoRA",
        )
    return config


def read_adapter(config: bytes, tensors: Iterable[tuple[str, Shaped]], *, patterns: bool) -> Adapter:
    """Determines an adapter's changes from its config and its tensors' names, dtypes and shapes.

    `patterns` says whether to try the config's regular expressions on the names of modules. That can take for ever,
    so only who has the adapter for itself does it: a push and a worker, not the controller.
    Errors: CheckpointInvalid, naming the setting or the tensor that cannot be applied.
    """
    settings = read_config(config)
    sides: dict[str, dict[str, tuple[str, Shaped]]] = {}
    whole: dict[str, ReplacedTensor] = {}
    for name, tensor in tensors:
        if not name.startswith(PREFIX):
            raise CheckpointInvalid(f"tensor {name!r} of the adapter does not begin with {PREFIX}, as PEFT writes it")
        if tensor.dtype not in FLOATS:
            raise CheckpointInvalid(
                f"tensor {name!r} of the adapter is {tensor.dtype}; {sorted(FLOATS)} can be applied"
            )
        bare = name.removeprefix(PREFIX).replace(WRAPPED, ".")
        side = next((end for end in (A, B) if bare.endswith(end)), None)
        if side:
            taken = sides.setdefault(bare.removesuffix(side), {}).setdefault(side, (name, tensor))[0]
        elif "lora_" in bare or "trainable_tokens" in bare:
            raise CheckpointInvalid(f"tensor {name!r} of the adapter is of a kind that is not applied", hint=_MERGE)
        else:
            taken = whole.setdefault(bare, ReplacedTensor(name=name, tensor=tensor)).name
        if taken != name:
            raise CheckpointInvalid(f"tensors {taken!r} and {name!r} of the adapter are both for {bare!r} of the base")
    if not sides:
        raise CheckpointInvalid("the adapter has no lora_A and lora_B of any module")
    pairs = {module: _pair(settings, module, found, patterns=patterns) for module, found in sides.items()}
    return Adapter(config=settings, pairs=pairs, whole=whole)


def check_fits(adapter: Adapter, base: Mapping[str, Shaped]) -> None:
    """Checks that an adapter fits its base. Errors: CheckpointInvalid, naming the first tensor that does not fit."""
    for target, whole in adapter.whole.items():
        if adapter.config.saves(target):
            continue
        if target not in base:
            raise _missing(f"the adapter replaces {target}", target, base)
        if base[target].shape != whole.tensor.shape:
            raise CheckpointInvalid(
                f"the adapter replaces {target} by {list(whole.tensor.shape)}, "
                f"that of the base is {list(base[target].shape)}",
                hint=_ANOTHER,
            )
    for module, pair in adapter.pairs.items():
        target = f"{module}.weight"
        if target not in adapter.whole and target not in base:
            raise _missing(f"the adapter changes module {module}", target, base)
        changed = adapter.whole[target].tensor if target in adapter.whole else base[target]
        if changed.shape != pair.made:
            raise CheckpointInvalid(
                f"the adapter makes {list(pair.made)} for module {module}, and {target} is {list(changed.shape)}",
                hint=_ANOTHER,
            )
        if changed.dtype not in FLOATS:
            raise CheckpointInvalid(
                f"the adapter changes {target}, which is stored as {changed.dtype}; {sorted(FLOATS)} can be changed"
            )


def _pair(config: LoraConfig, module: str, found: Mapping[str, tuple[str, Shaped]], *, patterns: bool) -> Pair:
    for side in (A, B):
        if side not in found:
            raise CheckpointInvalid(f"module {module} of the adapter has no {side[1:]}")
    (a_name, a), (b_name, b) = found[A], found[B]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointInvalid(
            f"module {module} of the adapter has lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
            "not [r, in] and [out, r]"
        )
    if patterns or not config.rank_pattern:
        rank = config.rank(module)
        if a.shape[0] != rank:
            raise CheckpointInvalid(f"module {module} of the adapter has rank {a.shape[0]}, {CONFIG} says {rank}")
    if not _is_target(config.target_modules, module, patterns=patterns):
        raise CheckpointInvalid(f"{CONFIG}: target_modules do not name {module}, which the adapter changes")
    if patterns:
        config.scale(module)
    columns, rows = a.shape[1], b.shape[0]
    return Pair(a=a_name, b=b_name, made=(columns, rows) if config.fan_in_fan_out else (rows, columns))


def _is_target(targets: list[str] | str, module: str, *, patterns: bool) -> bool:
    """PEFT's rule."""
    if isinstance(targets, list):
        return any(module == end or module.endswith(f".{end}") for end in targets)
    return targets.lower() == _ALL_LINEAR or not patterns or bool(_expression(targets).fullmatch(module))


def _by_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    """PEFT's rule: the first pattern that matches the module's name or its end behind a dot."""
    for pattern, value in patterns.items():
        if _expression(pattern, before=r"(.*\.)?(", after=")$").match(module):
            return value
    return otherwise


@functools.lru_cache(maxsize=4096)
def _expression(pattern: str, *, before: str = "", after: str = "") -> re.Pattern[str]:
    """`re` keeps 512, and some adapters have a pattern for each of their modules."""
    try:
        return re.compile(f"{before}{pattern}{after}")
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointInvalid(f"{CONFIG}: {pattern[:80]!r} is no regular expression: {error}") from error


def _missing(what: str, target: str, base: Mapping[str, Shaped]) -> CheckpointInvalid:
    end = ".".join(target.split(".")[-2:])
    alike = [name for name in base if name.endswith(end)] or base
    compared = [name for name in islice(alike, _NEAREST_OF) if len(name) <= 256]
    near = ", ".join(repr(name) for name in difflib.get_close_matches(target, compared))
    return CheckpointInvalid(
        f"{what}, and the base has no {target}; the nearest of its {len(base)}: {near or 'none that is like it'}",
        hint=_ANOTHER,
    )


def is_adapter(manifest: Manifest) -> bool:
    return CONFIG in manifest.files


def require_fit(name: FunctionName, base: Manifest, adapter: Adapter, *, named: str = "") -> None:
    """Checks at deploy that an adapter fits its base. `named`: its name, if the function has several. Errors:
    InvalidSpec, naming the first tensor that does not fit."""
    if is_adapter(base):
        raise InvalidSpec(
            f"function {name}: its weights are a LoRA adapter, which is no model",
            hint='write weights="./base", adapter="./lora"',
        )
    weights = {**base.tensors, **{alias: base.tensors[tensor] for alias, tensor in base.aliases.items()}}
    try:
        check_fits(adapter, weights)
    except CheckpointInvalid as error:
        where = f"{name}: adapter {named}" if named else name
        raise InvalidSpec(f"function {where}: {error.message}", hint=error.hint) from error
