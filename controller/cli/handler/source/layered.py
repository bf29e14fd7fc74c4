"""Checks of layered models at deploy: classes that are `Layered`, and weights whose names have layer numbers.

Both are checked before anything is sent, so that an error names file and line. What only running the file would show
(a base class from another module) is left to the worker's start.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass

from fleetstart.runtime.contract.errors import InvalidSpec, NoHandler

from ...weights.publish_layout import layer_numbers
from ...weights.source import Source
from .constants import dotted

LAYERED = "Layered"
PARTS = {
    "before": "def before(self, image: bytes): ...  # a request's input -> activations",
    "layer": "def layer(self, weights, index): ...  # gives the index-th layer, which is called with activations",
}
"""Methods that a class must have, and how each is written."""
SYNCHRONOUS = ("load", "layer", "before", "after")


@dataclass(frozen=True, slots=True)
class ClassMethods:
    """Methods of a class, and the asynchronous ones among them; `known` if all its bases are known."""

    methods: frozenset[str]
    asynchronous: frozenset[str]
    known: bool = True


class LayeredClasses:
    """The layered classes of a file, by name, `Layered` itself among them."""

    def __init__(self) -> None:
        self._shapes: dict[str, ClassMethods] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def offer(self, name: str) -> None:
        """Registers a name under which `Layered` is imported."""
        self._shapes[name] = ClassMethods(frozenset(), frozenset())

    def forget(self, name: str) -> None:
        self._shapes.pop(name, None)

    def add(self, name: str, shape: ClassMethods) -> None:
        self._shapes[name] = shape

    def shape_of(self, statement: ast.ClassDef) -> ClassMethods | None:
        """Methods of a class statement; None if no base of it is layered."""
        names = [dotted(base) for base in statement.bases]
        bases = [self._shapes[name] for name in names if name in self._shapes]
        if not bases:
            return None
        methods: set[str] = set().union(*(base.methods for base in bases))
        asynchronous: set[str] = set().union(*(base.asynchronous for base in bases))
        for one in statement.body:
            own = _names(one)
            methods |= own
            asynchronous = asynchronous | own if isinstance(one, ast.AsyncFunctionDef) else asynchronous - own
        known = len(bases) == len(names) and all(base.known for base in bases)
        return ClassMethods(frozenset(methods), frozenset(asynchronous), known)

    def check(self, name: str, where: str) -> None:
        """Checks that a declared class is complete. Errors: NoHandler, naming the method that it lacks."""
        shape = self._shapes[name]
        for part, how in PARTS.items():
            if shape.known and part not in shape.methods:
                raise NoHandler(f"{where}: class {name} is Layered and has no {part}()", hint=f"add `{how}`")
        for part in SYNCHRONOUS:
            if part in shape.asynchronous:
                raise NoHandler(
                    f"{where}: {part}() of class {name} is asynchronous",
                    hint=f"write `def {part}`: a Layered model computes in threads, and nothing of it waits for a loop",
                )


def _names(statement: ast.stmt) -> set[str]:
    """Names that a statement of a class's body defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return {name}
    return set()


def with_layer_names(source: Source, pattern: str, where: str) -> Source:
    """The weights with the pattern of their layers' names. Errors: InvalidSpec if no tensor's name fits it."""
    names = [tensor.name for tensor in source.tensors]
    if any(number is not None for number in layer_numbers(names, pattern).values()):
        return dataclasses.replace(source, layers=pattern)
    shown = ", ".join(names[:3] + (["..."] if len(names) > 3 else []))
    if pattern:
        raise InvalidSpec(
            f"{where}: no tensor's name begins as layers={pattern!r} says; there are {len(names)}: {shown}",
            hint="each {} stands for digits, and a dot or the name's end follows the pattern",
        )
    raise InvalidSpec(
        f"{where}: none of the {len(names)} tensor names in the weights has a layer number: {shown}",
        hint='say how the layers\' names begin, with {} for a number: @function(weights=..., layers="features.{}")',
    )
