"""Names of a handler's file and of the files beside it, resolved in their syntax trees. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetstart.runtime.contract.errors import FleetError, HandlerSyntax

from .constants import NotConstant, dotted, evaluate
from .parse import parse

DEPTH_MAX = 40
"""Nesting of one annotation, and bases of a class: nobody writes deeper ones."""
TYPING = ("typing", "typing_extensions", "collections.abc")
_BASES = {
    "msgspec.Struct": "struct",
    "pydantic.BaseModel": "model",
    **{f"{home}.TypedDict": "typeddict" for home in TYPING},
    **{f"{home}.NamedTuple": "namedtuple" for home in TYPING},
    **{f"enum.{name}": "enum" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")},
}


@dataclass
class Module:
    """Names of one file: what they are imported as, and the statements that bind them."""

    tree: ast.Module
    folder: Path
    name: str = "handler"
    imports: dict[str, str] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Module:
        """The names of a file. Errors: HandlerSyntax, OSError."""
        return cls(parse(path.read_bytes(), str(path)), path.parent, path.stem)

    @property
    def path(self) -> Path:
        return self.folder.joinpath(*self.name.split(".")).with_suffix(".py")

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            self._bind(statement)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)

    def __contains__(self, name: str) -> bool:
        return name in self.classes or name in self.values or name in self.functions

    def _bind(self, statement: ast.stmt) -> None:
        match statement:
            case ast.ClassDef(name=name):
                self.classes[name] = statement
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.functions[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.values[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.values[name] = value

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self.imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
            else:
                self.imports[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"

    def full(self, node: ast.expr) -> str:
        """The dotted name of an expression, with what its first part is imported as; "" of anything else."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest if name else ""

    def short(self, node: ast.expr) -> str:
        """ "Optional" of `typing.Optional`; the dotted name of what is not typing's."""
        full = self.full(node)
        home, _, name = full.rpartition(".")
        return name if home in TYPING else full


def constant(node: ast.expr, module: Module) -> tuple[Any, bool]:
    """The value of an expression that states one, and whether it does."""
    try:
        return evaluate(node, _Constants(module), {}), True
    except (NotConstant, FleetError):
        return None, False


class _Constants(Mapping[str, object]):
    """Names of a module that stand for literals; looked up one step, so that none leads in a circle."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> object:
        value = self._module.values[name]
        return evaluate(value, {}, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._module.values)

    def __len__(self) -> int:
        return len(self._module.values)


class NameResolver:
    """Finds names in a file and in the files beside it, each of which is read once."""

    def __init__(self) -> None:
        self._modules: dict[Path, Module | None] = {}

    def find(self, full: str, module: Module) -> tuple[Module, str] | None:
        """The file that binds a dotted name, and the name there."""
        if full in module:
            return module, full
        home, _, name = full.rpartition(".")
        beside = self._beside(module.folder, home.strip(".")) if home.strip(".") else None
        if beside is None:
            return None
        return (beside, name) if name in beside.classes or name in beside.values else None

    def find_class(self, node: ast.expr, module: Module) -> tuple[ast.ClassDef, Module] | None:
        """The class that an expression names, and its file."""
        found = self.find(module.full(node), module)
        return (found[0].classes[found[1]], found[0]) if found is not None and found[1] in found[0].classes else None

    def _beside(self, folder: Path, dotted_name: str) -> Module | None:
        path = folder.joinpath(*dotted_name.split(".")).with_suffix(".py")
        if path not in self._modules:
            self._modules[path] = None
            if path.is_file():
                try:
                    self._modules[path] = Module(parse(path.read_bytes(), str(path)), folder, dotted_name)
                except (HandlerSyntax, OSError):
                    self._modules[path] = None
        return self._modules[path]

    def kind_of(self, node: ast.ClassDef, module: Module, depth: int = 0) -> str:
        """ "struct", "dataclass", "typeddict", "namedtuple", "model", "enum"; "" if the class is no data."""
        for decorator in node.decorator_list:
            full = module.full(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if full in ("dataclasses.dataclass", "pydantic.dataclasses.dataclass"):
                return "dataclass"
        for base in node.bases:
            kind = _BASES.get(module.full(base), "")
            found = self.find_class(base, module) if not kind and depth < DEPTH_MAX else None
            kind = self.kind_of(*found, depth + 1) if found is not None else kind
            if kind:
                return kind
        return ""
