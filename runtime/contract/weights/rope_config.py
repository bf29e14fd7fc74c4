"""Rotary position embedding as config.json sets it: base, rotated part of a head, and how it is stretched.

Angles are computed in `runtime.llm.model.rope`. Every scaling that changes them is read completely or refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """A base that grows with the length of the context, from `original_positions` on."""

    factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Long waves stretched, short ones not, with a ramp between them (Peng et al., YaRN, 2023)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A factor for each frequency, of two lists: contexts up to `original_positions` use the short one."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's scaling of rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary settings of one kind of layer. `rotary_dim` of each head's numbers are rotated, the first ones."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0

    def reach(self, max_positions: int) -> int:
        """Longest context that the scaling is made for, where config.json counts positions without it."""
        match self.scaling:
            case DynamicScaling(factor=factor):
                return int(max_positions * factor)
            case YarnScaling(factor=factor, original_positions=original):
                return max(max_positions, int(original * factor))
            case _:
                return max_positions


def read_rope(rope: dict[str, Any], *, theta: float, head_dim: int, max_positions: int, original: int | None) -> Rope:
    """Reads one object of rotary settings. `theta` and `original` (positions before the scaling) are those that stand
    beside it, for what it leaves out.

    Errors: CheckpointInvalid, naming the scaling that is unknown, or its field.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotary_dim = int(head_dim * _number(rope, kind, "partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointInvalid(f"config.json: partial_rotary_factor makes {rotary_dim} of {head_dim} numbers rotate")
    base = _number(rope, kind, "rope_theta", theta)
    if base <= 1:
        raise CheckpointInvalid(f"config.json: rope_theta must be greater than 1, is {base}")
    return Rope(theta=base, rotary_dim=rotary_dim, scaling=_scaling(rope, kind, rotary_dim, max_positions, original))


def _scaling(
    rope: dict[str, Any], kind: object, rotary_dim: int, max_positions: int, original: int | None
) -> RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=_number(rope, kind, "factor"))
        case "dynamic":
            return DynamicScaling(factor=_number(rope, kind, "factor"), original_positions=max_positions)
        case "yarn":
            return _yarn(rope, max_positions, original)
        case "longrope" | "su":
            return _longrope(rope, rotary_dim, max_positions, original)
        case "llama3":
            return Llama3Scaling(
                factor=_number(rope, kind, "factor"),
                low_freq_factor=_number(rope, kind, "low_freq_factor"),
                high_freq_factor=_number(rope, kind, "high_freq_factor"),
                original_positions=_original(rope, kind, max_positions, original),
            )
        case _:
            raise CheckpointInvalid(
                f"config.json: rope scaling {kind!r} is not supported",
                hint="the engine computes default, linear, dynamic, yarn, longrope and llama3",
            )


def _yarn(rope: dict[str, Any], max_positions: int, original: int | None) -> YarnScaling:
    positions = _original(rope, "yarn", max_positions, original)
    factor = _number(rope, "yarn", "factor", max_positions / positions)
    scale, scale_all = (_number(rope, "yarn", name, 0.0) for name in ("mscale", "mscale_all_dim"))
    attention = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all) if scale and scale_all else None
    return YarnScaling(
        factor=factor,
        original_positions=positions,
        beta_fast=_number(rope, "yarn", "beta_fast", 32.0),
        beta_slow=_number(rope, "yarn", "beta_slow", 1.0),
        truncate=rope.get("truncate", True) is not False,
        attention_factor=_number(rope, "yarn", "attention_factor", attention or _yarn_scale(factor)),
    )


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Sharpening of attention that makes up for stretched positions (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: dict[str, Any], rotary_dim: int, max_positions: int, original: int | None) -> LongRopeScaling:
    positions = _original(rope, "longrope", max_positions, original)
    factor = _number(rope, "longrope", "factor", max_positions / positions)
    if factor <= 1:
        attention = 1.0
    elif positions == 1:
        raise CheckpointInvalid("config.json: rope scaling 'longrope' has original_max_position_embeddings 1")
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(positions))
    return LongRopeScaling(
        short_factors=_factors(rope, "short_factor", rotary_dim // 2),
        long_factors=_factors(rope, "long_factor", rotary_dim // 2),
        original_positions=positions,
        attention_factor=_number(rope, "longrope", "attention_factor", attention),
    )


def _original(rope: dict[str, Any], kind: object, max_positions: int, original: int | None) -> int:
    """Positions before the scaling. What stands beside the object has precedence, as Phi-3's configuration has it."""
    return original or int(_number(rope, kind, "original_max_position_embeddings", max_positions))


def _number(rope: dict[str, Any], kind: object, name: str, default: float | None = None) -> float:
    value = rope.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointInvalid(f"config.json: rope scaling {kind!r}: {name} must be a positive number, is {value!r}")
    return float(value)


def _factors(rope: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointInvalid(f"config.json: rope scaling 'longrope': {name} must be a list of {count} numbers")
    return tuple(_number({name: value}, "longrope", name) for value in values)
