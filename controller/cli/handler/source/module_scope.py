"""The names of one source file: what they were imported as, and which statements bind them. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetstart.runtime.contract.errors import FleetError

from .constants import NotConstant, dotted, evaluate


@dataclass
class Module:
    """One file's names: what they were imported as, and the statements that bind them."""

    tree: ast.Module
    folder: Path
    imports: dict[str, str] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            self._bind(statement)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)

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
        """The dotted name of an expression, with what its first part was imported as; "" of anything else."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest if name else ""


def constant(node: ast.expr, module: Module) -> tuple[Any, bool]:
    """The value of an expression that states one, and whether it does."""
    if isinstance(node, ast.Constant) and node.value is ...:
        return ..., True
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
