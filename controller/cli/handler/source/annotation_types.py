"""Types that annotations name, made from the syntax tree: nothing of the handler is run or imported.

Types of the standard library are themselves. A class of the handler's file, or of a file beside it, is represented by
a class with the same fields, constraints and defaults: a msgspec.Struct for dataclass, TypedDict, Struct and pydantic
model, a namedtuple or an enum for these. So the rules for live types (`contract/function/signature.py`) and msgspec's
own JSON schemas hold for them. What the source does not tell (a class of a library, a computed type) is UNKNOWN.
"""

from __future__ import annotations

import ast
import builtins
import enum
from collections import namedtuple
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Annotated, Any, Literal, Union

import msgspec

from fleetstart.runtime.contract import errors
from fleetstart.runtime.contract.function.signature import LIMITS, constrained, is_unchecked

from .declarations import API
from .module_scope import DEPTH_MAX, TYPING, Module, NameResolver, constant

UNKNOWN = Annotated[Any, "unknown"]
"""A type that the source does not tell. Any value fits it; unlike Any itself it does not stand for a whole body."""

_STANDARD = frozenset((*TYPING, "collections", "datetime", "decimal", "uuid"))
_WRAPPERS = frozenset(("Required", "NotRequired", "ReadOnly", "Final", "InitVar"))
_CONSTRAINTS = frozenset((*LIMITS, "title", "description", "examples"))
_FOREIGN = frozenset(("Field", "Interval", "Len"))
"""Constraints of pydantic and annotated_types. They count in a signature and in a pydantic model; in other classes a
worker does not check them."""
_BY_POSITION = {
    **{f"annotated_types.{name}": (name.lower(),) for name in ("Ge", "Gt", "Le", "Lt")},
    "annotated_types.Len": ("min_length", "max_length"),
    "annotated_types.MaxLen": ("max_length",),
    "annotated_types.MinLen": ("min_length",),
    "annotated_types.MultipleOf": ("multiple_of",),
}
"""Names of arguments that are given by their position."""
_FIELD_MAKERS = frozenset(("dataclasses.field", "msgspec.field", "pydantic.Field"))
_STRUCT_OPTIONS = frozenset(("forbid_unknown_fields", "rename", "tag", "tag_field", "array_like"))
_STANDS_FOR = "__stands_for__"
"""Attribute of a Struct that represents a class: of which kind that is."""


class File:
    """Represents `fleetstart.runtime.File`."""


class Response:
    """Represents `fleetstart.runtime.Response`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The file in which an annotation is written, and how deep inside others."""

    module: Module
    foreign: bool = True
    """False in a class whose fields msgspec reads by itself."""
    model: bool = False
    """True in a pydantic model, also in the classes inside it."""
    depth: int = 0

    @property
    def inside(self) -> _Place:
        return replace(self, depth=self.depth + 1)


@dataclass(slots=True)
class _Field:
    """A field of a class: where its annotation is, and its default. `name` is that in JSON if the class states one."""

    annotation: ast.expr
    place: _Place
    required: bool
    name: str | None
    metas: list[msgspec.Meta]
    default: Any = msgspec.NODEFAULT
    """NODEFAULT also for a default that cannot be told."""


class AnnotationTypes:
    """Types of one handler's file and of the files beside it; each class is made once."""

    def __init__(self, module: Module) -> None:
        self.resolver = NameResolver()
        self.unchecked = ""
        """File and line of a constraint that no worker would check; empty if there is none."""
        self._module = module
        self._classes: dict[int, Any] = {}

    def type_of(self, node: ast.expr | None) -> Any:
        """The type of an annotation in the handler's file; Any if there is none."""
        return Any if node is None else self._type(node, _Place(self._module))

    def _type(self, node: ast.expr | None, place: _Place) -> Any:
        if place.depth > DEPTH_MAX:
            return UNKNOWN
        match node:
            case ast.Constant(value=None):
                return type(None)
            case ast.Constant(value=str(text)):
                return self._type(_parsed(text), place.inside)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return _union([self._type(left, place.inside), self._type(right, place.inside)])
            case ast.Subscript(value=value, slice=arguments):
                return self._generic(value, arguments.elts if isinstance(arguments, ast.Tuple) else [arguments], place)
            case ast.Name() | ast.Attribute():
                return self._named(node, place)
            case ast.Call(args=[_, base]) if place.module.short(node.func) == "NewType":
                return self._type(base, place.inside)
        return UNKNOWN

    def _generic(self, head: ast.expr, items: list[ast.expr], place: _Place) -> Any:
        name = place.module.short(head)
        if name == "Literal":
            values = [constant(item, place.module) for item in items]
            return Literal[tuple(value for value, _ in values)] if all(known for _, known in values) else UNKNOWN
        if name == "Annotated":
            self._look_for_unchecked(items[1:], place)
            return constrained(self._type(items[0], place.inside), _metas(items[1:], place))
        if name in _WRAPPERS:
            return self._type(items[0], place.inside)
        arguments = [... if _is_ellipsis(item) else self._type(item, place.inside) for item in items]
        if name in ("Optional", "Union"):
            return _union([*arguments, type(None)] if name == "Optional" else arguments)
        generic = self._named(head, place)
        if generic is UNKNOWN or generic is Any:
            return UNKNOWN
        try:
            return generic[tuple(arguments)]
        except TypeError:
            return UNKNOWN

    def _named(self, node: ast.expr, place: _Place) -> Any:
        full = place.module.full(node)
        if (live := _live(full)) is not None and full not in place.module:
            return UNKNOWN if live is object else live
        found = self.resolver.find(full, place.module)
        if found is None:
            # A handler's errors are no answers, whichever library they are from.
            return Exception if full.endswith(("Error", "Exception")) else UNKNOWN
        home, name = found
        if name in home.classes:
            return self._class(home.classes[name], home, place)
        return self._type(home.values.get(name), replace(place.inside, module=home))

    def _look_for_unchecked(self, said: list[ast.expr], place: _Place) -> None:
        for one in said:
            if not place.foreign and isinstance(one, ast.Call) and _constrains_elsewhere(one, place.module):
                self.unchecked = self.unchecked or f"{place.module.path}:{one.lineno}"

    # ── classes ────────────────────────────────────────────────────────────────────────────────────

    def _class(self, node: ast.ClassDef, module: Module, place: _Place) -> Any:
        if id(node) not in self._classes:
            self._classes[id(node)] = UNKNOWN
            try:
                self._make(node, module, place.model)
            except (TypeError, ValueError, AttributeError, RuntimeError):
                # A class that cannot be, as the worker will say, or one whose private fields have other names there.
                self._classes[id(node)] = UNKNOWN
        return self._classes[id(node)]

    def _make(self, node: ast.ClassDef, module: Module, inside_model: bool) -> None:
        """A class is known before the types of its fields: these may name it."""
        kind = self.resolver.kind_of(node, module)
        if kind == "":
            if any(_is_exception(self._named(base, _Place(module))) for base in node.bases):
                self._classes[id(node)] = Exception
            return
        if kind == "enum":
            self._classes[id(node)] = self._enum(node, module)
            return
        fields = self._fields(node, module, kind, inside_model)
        made = _namedtuple(node, fields) if kind == "namedtuple" else self._struct(node, module, kind, fields)
        self._classes[id(node)] = made
        made.__doc__ = ast.get_docstring(node)
        made.__annotations__ = {
            attribute: constrained(self._type(field.annotation, field.place), field.metas)
            for attribute, field in fields.items()
        }

    def _struct(self, node: ast.ClassDef, module: Module, kind: str, fields: dict[str, _Field]) -> Any:
        specs = [(attribute, Any, _field_spec(field)) for attribute, field in fields.items()]
        options = self._options(node, module)
        namespace = {_STANDS_FOR: kind}
        return msgspec.defstruct(node.name, specs, kw_only=True, module=module.name, namespace=namespace, **options)

    def _options(self, node: ast.ClassDef, module: Module) -> dict[str, Any]:
        """Keywords of a Struct's class statement and of its bases. Errors: ValueError for one that is computed."""
        options: dict[str, Any] = {}
        for base in node.bases:
            if (found := self.resolver.find_class(base, module)) is not None:
                options |= self._options(*found)
        for keyword in node.keywords:
            if keyword.arg in _STRUCT_OPTIONS:
                options[keyword.arg], known = constant(keyword.value, module)
                if not known:
                    raise ValueError(f"{keyword.arg} is computed")
        return options

    def _enum(self, node: ast.ClassDef, module: Module) -> Any:
        members = []
        for statement in node.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not name.startswith("_"):
                    literal, known = constant(value, module)
                    if not known and not (isinstance(value, ast.Call) and module.full(value.func) == "enum.auto"):
                        return UNKNOWN
                    members.append((name, literal if known else enum.auto()))
        names = [module.full(base).rpartition(".")[2] for base in node.bases if module.full(base).startswith("enum.")]
        made: Any = getattr(enum, names[0] if names else "Enum")(node.name, members, module=module.name)
        made.__doc__ = ast.get_docstring(node)
        return made

    def _fields(
        self, node: ast.ClassDef, module: Module, kind: str, inside_model: bool, depth: int = 0
    ) -> dict[str, _Field]:
        """A class's own fields after those of its bases, which they replace."""
        fields: dict[str, _Field] = {}
        for base in node.bases:
            found = self.resolver.find_class(base, module) if depth < DEPTH_MAX else None
            if found is not None:
                fields |= self._fields(*found, kind, inside_model, depth + 1)
        total = not any(one.arg == "total" and constant(one.value, module) == (False, True) for one in node.keywords)
        model = inside_model or kind == "model"
        place = _Place(module, foreign=model, model=model)
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=attribute), annotation=annotation, value=value):
                    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
                    name = module.short(outer)
                    if name in ("ClassVar", "dataclasses.KW_ONLY") or (kind == "model" and attribute.startswith("_")):
                        continue
                    field = _Field(annotation, place, value is None, None, [])
                    if kind == "typeddict":
                        field.required = name == "Required" or (total and name != "NotRequired")
                    elif value is not None:
                        if kind == "dataclass":
                            self._look_for_unchecked([value], place)
                        _read_default(field, value, kind)
                    fields[attribute] = field
        return fields


def stands_for(made: type[msgspec.Struct]) -> str:
    """The kind of class that a Struct represents, as `NameResolver.kind_of` names it."""
    return str(getattr(made, _STANDS_FOR, "struct"))


def _read_default(field: _Field, value: ast.expr, kind: str) -> None:
    """What stands to the right of a field: its default, or a call that says more of it."""
    module = field.place.module
    default: ast.expr | None = value
    if isinstance(value, ast.Call) and module.full(value.func) in _FIELD_MAKERS:
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        alias = getattr(given.get("alias") or given.get("name"), "value", None)
        if isinstance(alias, str):
            field.name = alias
        if kind == "model":
            field.metas = _metas([value], field.place)
        default = given.get("default") or (value.args[0] if value.args else None)
        field.required = default is None and "default_factory" not in given
    if default is None:
        return
    if _is_ellipsis(default):
        field.required = True
        return
    literal, known = constant(default, module)
    if known and (kind == "struct" or not isinstance(literal, list | dict)):
        field.default = literal


def _field_spec(field: _Field) -> Any:
    if field.required:
        return msgspec.field(name=field.name)
    default = field.default
    if default is msgspec.NODEFAULT or isinstance(default, list | dict):
        # Of factories msgspec describes list and dict alone.
        factory = type(default) if isinstance(default, list | dict) and not default else object
        return msgspec.field(name=field.name, default_factory=factory)
    return msgspec.field(name=field.name, default=default)


def _namedtuple(node: ast.ClassDef, fields: dict[str, _Field]) -> Any:
    defaults = [
        None if one.default is msgspec.NODEFAULT else one.default for one in fields.values() if not one.required
    ]
    return namedtuple(node.name, list(fields), defaults=defaults)


def _metas(said: list[ast.expr], place: _Place) -> list[msgspec.Meta]:
    """Constraints of `Annotated[...]` or of a pydantic model's `Field(...)`."""
    found = []
    for one in said:
        name = place.module.full(one.func).rpartition(".")[2] if isinstance(one, ast.Call) else ""
        if not isinstance(one, ast.Call) or not (name == "Meta" or (place.foreign and name in _FOREIGN)):
            continue
        given = {keyword.arg: keyword.value for keyword in one.keywords if keyword.arg in _CONSTRAINTS}
        values = {str(key): constant(value, place.module) for key, value in given.items()}
        with suppress(TypeError, ValueError):  # one that msgspec does not take
            found.append(msgspec.Meta(**{key: value for key, (value, known) in values.items() if known}))
    return found


def _constrains_elsewhere(said: ast.Call, module: Module) -> bool:
    """Checks whether it is a constraint of pydantic or annotated_types whose value the source tells."""
    full = module.full(said.func)
    given = dict(zip(_BY_POSITION.get(full, ()), said.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in said.keywords if keyword.arg is not None}
    return is_unchecked(full, {name: constant(value, module)[0] for name, value in given.items()})


def _union(options: list[Any]) -> Any:
    if UNKNOWN in options or Any in options:
        # Answers are told apart by these, whatever else there is.
        options = [UNKNOWN, *(one for one in options if one is Response or _is_exception(one))]
    return Union[tuple(options)]  # noqa: UP007  # types that are data


def _live(full: str) -> Any:
    """What a name stands for, if it is the standard library's or fleetstart's; None of any other."""
    home, _, name = full.rpartition(".")
    if home == API:
        ours = {"File": File, "Response": Response}
        return ours.get(name) or getattr(errors, name, None)
    if not home:
        found = getattr(builtins, name, None)
        return found if isinstance(found, type) else None
    if home not in _STANDARD:
        return None
    return getattr(import_module("typing" if home == "typing_extensions" else home), name, None)


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
