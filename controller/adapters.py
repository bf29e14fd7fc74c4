"""Whether a LoRA adapter fits the weights that it is to adapt, told from the two manifests alone.

PEFT names the factors of a module `base_model.model.{module}.lora_A.weight`, [r, in], and `lora_B`, [out, r]; their
product is added to `{module}.weight`, [out, in], of the base. A worker finds the module in the same way, so what
passes here can be applied there.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.manifest import Manifest, TensorEntry

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"

Shape = tuple[int, ...]


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of one module's factors; None for one that is missing."""

    a: Shape | None = None
    b: Shape | None = None

    @property
    def wrong(self) -> str:
        """What keeps them from being multiplied, "" if nothing does."""
        if self.a is None or self.b is None:
            return f"has no {(A if self.a is None else B)[1:]}"
        if len(self.a) != 2 or len(self.b) != 2 or self.a[0] != self.b[1] or not self.a[0]:
            return f"has lora_A {list(self.a)} and lora_B {list(self.b)}, which are not [r, in] and [out, r]"
        return ""


def factors_of(shapes: Iterable[tuple[str, Shape]]) -> tuple[dict[str, Factors], list[str]]:
    """Factors by the module's name in the base, and names of tensors that are no factors."""
    found: dict[str, Factors] = {}
    others: list[str] = []
    for name, shape in shapes:
        for suffix, side in ((A, "a"), (B, "b")):
            module = name.removeprefix(PREFIX).removesuffix(suffix)
            if name.startswith(PREFIX) and name.endswith(suffix) and module:
                known = found.get(module, Factors())
                found[module] = msgspec.structs.replace(known, **{side: shape})
                break
        else:
            others.append(name)
    return found, others


def is_adapter(manifest: Manifest) -> bool:
    return CONFIG in manifest.files


def check_fits(name: FunctionName, base: Manifest, adapter: Manifest) -> None:
    """Errors: InvalidSpec, naming the first module that does not fit."""
    if not is_adapter(adapter):
        raise InvalidSpec(
            f"function {name}: its adapter has no {CONFIG}: these are weights, not a LoRA adapter",
            hint="`fs weights push FOLDER` says of a folder in PEFT's format that it is an adapter",
        )
    if is_adapter(base):
        raise InvalidSpec(
            f"function {name}: its weights are a LoRA adapter, which is no model",
            hint='write weights="./base", adapter="./lora"',
        )
    modules, others = factors_of((tensor, entry.shape) for tensor, entry in _named(adapter))
    if others or not modules:
        raise InvalidSpec(f"function {name}: tensor {(others or ['none'])[0]!r} of its adapter is not a LoRA factor")
    weights = {tensor: entry.shape for tensor, entry in _named(base)}
    for module, factors in modules.items():
        if factors.wrong or factors.a is None or factors.b is None:
            raise InvalidSpec(f"function {name}: module {module} of its adapter {factors.wrong}")
        expected = weights.get(f"{module}.weight")
        if expected is None:
            raise InvalidSpec(
                f"function {name}: its adapter changes module {module}, and the weights have no {module}.weight",
                hint="was the adapter trained on another model?",
            )
        made = (factors.b[0], factors.a[1])
        if expected != made:
            raise InvalidSpec(
                f"function {name}: its adapter makes {list(made)} for module {module}, "
                f"and {module}.weight of the weights is {list(expected)}",
                hint="was the adapter trained on another model?",
            )


def _named(manifest: Manifest) -> list[tuple[str, TensorEntry]]:
    """Tensors by every name that they have."""
    further = [(name, manifest.tensors[tensor]) for name, tensor in manifest.aliases.items()]
    return [*manifest.tensors.items(), *further]
