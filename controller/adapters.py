"""LoRA adapters in PEFT's format: what can be applied, and whether one fits the weights that it is to adapt.

PEFT names the factors of a module `base_model.model.{module}.lora_A.weight`, [r, in], and `lora_B`, [out, r]; their
product is added to `{module}.weight`, [out, in], of the base. Tensors of other names stand in for the base's. All of
this is told by names and shapes, so a push refuses what no worker could apply, and a deploy what does not fit its
base, before anything starts. The worker, which computes with it, decides by the same rules (`runtime.lora`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.manifest import Manifest

CONFIG = "adapter_config.json"
CONFIG_MAX_BYTES = 1 << 20
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

MUST_BE_OFF = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Settings of PEFT's LoraConfig with which an adapter is more than products of factors and whole tensors."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that take something out of the base's weights, which the base as it was published still has."""
_MERGE = "merge it into its base with PEFT's merge_and_unload() and push the whole model"

Tensor = tuple[str, tuple[int, ...]]
"""dtype and shape."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of adapter_config.json, what decides whether an adapter fits."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool | None = False
    fan_in_fan_out: bool | None = False
    """Whether the base stores its matrices as [in, out], as GPT-2 does."""
    modules_to_save: list[str] | None = None
    """Ends of names of modules that the adapter has whole, and may have alone."""
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """One module's two; None for one that is missing."""

    a: Tensor | None = None
    b: Tensor | None = None


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    config: AdapterConfig
    factors: dict[str, Factors]
    """By the name of the module in the base."""
    whole: dict[str, Tensor]
    """Tensors that stand in for the base's, by their names there."""


def is_adapter(manifest: Manifest) -> bool:
    return CONFIG in manifest.files


def read_adapter(config: bytes, tensors: Iterable[tuple[str, Tensor]]) -> Adapter:
    """Errors: CheckpointInvalid, naming the setting or the tensor that cannot be applied."""
    settings = _config(config)
    factors: dict[str, Factors] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if not name.startswith(PREFIX):
            raise CheckpointInvalid(f"tensor {name!r} of the adapter does not begin with {PREFIX}, as PEFT writes it")
        if tensor[0] not in FLOATS:
            raise CheckpointInvalid(f"tensor {name!r} of the adapter is {tensor[0]}; {sorted(FLOATS)} can be applied")
        bare = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        if bare.endswith((A, B)):
            module = bare.removesuffix(A).removesuffix(B)
            side = {"a": tensor} if bare.endswith(A) else {"b": tensor}
            factors[module] = msgspec.structs.replace(factors.get(module, Factors()), **side)
        elif "lora_" in bare or "trainable_tokens" in bare:
            raise CheckpointInvalid(f"tensor {name!r} of the adapter is of a kind that is not applied", hint=_MERGE)
        else:
            whole[bare] = tensor
    if not factors:
        raise CheckpointInvalid("the adapter has no lora_A and lora_B of any module")
    for module, pair in factors.items():
        _check_pair(settings, module, pair)
    return Adapter(config=settings, factors=factors, whole=whole)


def check_fits(name: FunctionName, base: Manifest, adapter: Adapter) -> None:
    """Errors: InvalidSpec, naming the first module that does not fit."""
    if is_adapter(base):
        raise InvalidSpec(
            f"function {name}: its weights are a LoRA adapter, which is no model",
            hint='write weights="./base", adapter="./lora"',
        )
    weights = {**base.tensors, **{alias: base.tensors[tensor] for alias, tensor in base.aliases.items()}}
    another = "was the adapter trained on another model?"
    for tensor, (_, shape) in adapter.whole.items():
        saved = any(f".{module}." in f".{tensor}" for module in adapter.config.modules_to_save or ())
        if tensor not in weights and not saved:
            raise InvalidSpec(
                f"function {name}: its adapter replaces {tensor}, which the weights do not have", hint=another
            )
        if tensor in weights and not saved and weights[tensor].shape != shape:
            raise InvalidSpec(
                f"function {name}: its adapter replaces {tensor} by {list(shape)}, "
                f"that of the weights is {list(weights[tensor].shape)}",
                hint=another,
            )
    for module, pair in adapter.factors.items():
        target = f"{module}.weight"
        made = _made(pair, turned=bool(adapter.config.fan_in_fan_out))
        if target not in adapter.whole and target not in weights:
            raise InvalidSpec(
                f"function {name}: its adapter changes module {module}, and the weights have no {target}", hint=another
            )
        dtype, expected = adapter.whole.get(target) or (weights[target].dtype, weights[target].shape)
        if expected != made:
            raise InvalidSpec(
                f"function {name}: its adapter makes {list(made)} for module {module}, "
                f"and {target} of the weights is {list(expected)}",
                hint=another,
            )
        if dtype not in FLOATS:
            raise InvalidSpec(
                f"function {name}: its adapter changes {target}, which is stored as {dtype}; "
                f"{sorted(FLOATS)} can be changed"
            )


def _config(data: bytes) -> AdapterConfig:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        config = msgspec.json.decode(data, type=AdapterConfig)
        used = [name for name in MUST_BE_OFF if name in fields and msgspec.json.decode(fields[name])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{CONFIG} is not a LoRA adapter's: {error}") from error
    if config.peft_type != "LORA":
        raise CheckpointInvalid(f"{CONFIG}: peft_type is {config.peft_type[:40]!r}, and only LORA can be applied")
    if used:
        raise CheckpointInvalid(f"{CONFIG}: {used[0]} is not applied here", hint=_MERGE)
    if config.r < 1 or any(rank < 1 for rank in (config.rank_pattern or {}).values()):
        raise CheckpointInvalid(f"{CONFIG}: a rank must be at least 1, r is {str(config.r)[:20]}")
    if not config.target_modules:
        raise CheckpointInvalid(f"{CONFIG}: target_modules names no module")
    if config.bias not in ("none", "all", "lora_only"):
        raise CheckpointInvalid(f"{CONFIG}: bias is {config.bias[:40]!r}; none, all and lora_only are known")
    begun = str(config.init_lora_weights).lower()
    if begun.startswith(_CHANGES_BASE):
        raise CheckpointInvalid(
            f"{CONFIG}: init_lora_weights {begun[:40]!r} belongs to a base with other weights than were published",
            hint="save it with path_initial_model_for_weight_conversion, which makes it an ordinary LoRA",
        )
    return config


def _check_pair(config: AdapterConfig, module: str, pair: Factors) -> None:
    if pair.a is None or pair.b is None:
        raise CheckpointInvalid(f"module {module} of the adapter has no {(A if pair.a is None else B)[1:]}")
    (_, a), (_, b) = pair.a, pair.b
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise CheckpointInvalid(
            f"module {module} of the adapter has lora_A {list(a)} and lora_B {list(b)}, not [r, in] and [out, r]"
        )
    if a[0] != config.r and not config.rank_pattern:
        raise CheckpointInvalid(f"module {module} of the adapter has rank {a[0]}, {CONFIG} says {config.r}")
    targets = config.target_modules
    if isinstance(targets, list) and not any(module == end or module.endswith(f".{end}") for end in targets):
        raise CheckpointInvalid(f"{CONFIG}: target_modules do not name {module}, which the adapter changes")


def _made(pair: Factors, *, turned: bool) -> tuple[int, ...]:
    """Shape of the factors' product, as the base stores it."""
    assert pair.a is not None
    assert pair.b is not None
    return (pair.a[1][1], pair.b[1][0]) if turned else (pair.b[1][0], pair.a[1][1])
