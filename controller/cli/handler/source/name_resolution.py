"""Where a name of a handler's file is bound: there, or in a file beside it; and what kind of data a class is."""

from __future__ import annotations

import ast
from pathlib import Path

from fleetstart.runtime.contract.errors import HandlerSyntax

from .module_scope import Module
from .parse import parse

DEPTH_MAX = 40
"""Of one annotation, or of the bases of a class: deeper is nothing that somebody wrote."""
TYPING = ("typing", "typing_extensions", "collections.abc")
_BASES = {
    "msgspec.Struct": "struct",
    "pydantic.BaseModel": "model",
    **{f"{home}.TypedDict": "typeddict" for home in TYPING},
    **{f"{home}.NamedTuple": "namedtuple" for home in TYPING},
    **{f"enum.{name}": "enum" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")},
}


def short_name(node: ast.expr, module: Module) -> str:
    """ "Optional" of `typing.Optional`, "list" of `list`; the dotted name of what is not typing's."""
    full = module.full(node)
    home, _, name = full.rpartition(".")
    return name if home in TYPING else full


class NameResolver:
    """Each file is read once."""

    def __init__(self) -> None:
        self._modules: dict[Path, Module | None] = {}

    def find(self, full: str, module: Module) -> tuple[Module, str] | None:
        """Where a name is bound: in the module itself, or in a file beside it."""
        if full in module.classes or full in module.values or full in module.functions:
            return module, full
        home, _, name = full.rpartition(".")
        beside = self._beside(module.folder, home.strip(".")) if home.strip(".") else None
        if beside is None:
            return None
        return (beside, name) if name in beside.classes or name in beside.values else None

    def _beside(self, folder: Path, dotted_name: str) -> Module | None:
        path = folder.joinpath(*dotted_name.split(".")).with_suffix(".py")
        if path not in self._modules:
            self._modules[path] = None
            if path.is_file():
                try:
                    self._modules[path] = Module(parse(path.read_bytes(), str(path)), folder)
                except (HandlerSyntax, OSError):
                    self._modules[path] = None
        return self._modules[path]

    def kind_of(self, node: ast.ClassDef, module: Module, depth: int = 0) -> str:
        """ "struct", "dataclass", "typeddict", "namedtuple", "model", "enum"; "" if it is no data."""
        for decorator in node.decorator_list:
            full = module.full(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if full in ("dataclasses.dataclass", "pydantic.dataclasses.dataclass"):
                return "dataclass"
        for base in node.bases:
            kind = _BASES.get(module.full(base), "")
            found = self.find(module.full(base), module) if not kind and depth < DEPTH_MAX else None
            if found is not None and found[1] in found[0].classes:
                kind = self.kind_of(found[0].classes[found[1]], found[0], depth + 1)
            if kind:
                return kind
        return ""
