"""JSON schemas of annotations, read from syntax trees: nothing of the handler is run or imported.

What the runtime checks is described as msgspec would describe it: dataclass, TypedDict, NamedTuple, msgspec.Struct,
pydantic models, enums, Literal, and constraints in `Annotated[...]`. Classes may stand in the handler's file or in
modules beside it. What cannot be told (a class of a library, a type that is computed) is described as anything.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from .json_schema import PLAIN, Schema, any_of, array, constrained, literal, object_of, tuple_of
from .module_scope import Module, constant
from .name_resolution import DEPTH_MAX, NameResolver, short_name

REF = "#/components/schemas/{}"

_ARRAYS = frozenset(
    (
        "list", "List", "set", "Set", "frozenset", "FrozenSet", "Sequence", "MutableSequence", "Collection", "Iterable",
        "Iterator", "Generator", "AsyncIterator", "AsyncIterable", "AsyncGenerator",
    )
)  # fmt: skip
_SETS = ("set", "frozenset")
_OBJECTS = frozenset(["dict", "Dict", "Mapping", "MutableMapping"])
_WRAPPERS = frozenset(["Required", "NotRequired", "ReadOnly", "Final", "InitVar"])
_UNTYPED = frozenset(["typing.Any", "object", "typing_extensions.Any"])


class TypeSchemas:
    """Of one handler's file and the modules beside it; classes that were met are in `schemas`."""

    def __init__(self, module: Module) -> None:
        self.schemas: dict[str, Schema] = {}
        self.resolver = NameResolver()
        self._named: dict[int, str] = {}
        self.module = module

    def schema(self, node: ast.expr | None, module: Module | None = None, depth: int = 0) -> Schema:
        module = module or self.module
        if node is None or depth > DEPTH_MAX:
            return {}

        def inner(one: ast.expr) -> Schema:
            return self.schema(one, module, depth + 1)

        match node:
            case ast.Constant(value=None):
                return dict(PLAIN["None"])
            case ast.Constant(value=str(text)):
                return self.schema(_parsed(text), module, depth + 1)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return any_of([inner(left), inner(right)])
            case ast.Subscript(value=value, slice=arguments):
                items = arguments.elts if isinstance(arguments, ast.Tuple) else [arguments]
                return self._generic(short_name(value, module), items, module, inner)
            case ast.Name() | ast.Attribute():
                return self._named_type(node, module, depth)
        return {}

    def _generic(self, name: str, items: list[ast.expr], module: Module, inner: Callable[[ast.expr], Schema]) -> Schema:
        if name in _ARRAYS:
            return array(inner(items[0]), unique=name.lower() in _SETS)
        if name in _OBJECTS:
            return object_of(inner(items[1]) if len(items) > 1 else {})
        if name in ("tuple", "Tuple"):
            if len(items) == 2 and isinstance(items[1], ast.Constant) and items[1].value is ...:
                return array(inner(items[0]))
            return tuple_of([inner(item) for item in items])
        if name == "Optional":
            return any_of([inner(items[0]), dict(PLAIN["None"])])
        if name == "Union":
            return any_of([inner(item) for item in items])
        if name == "Literal":
            return literal(items)
        if name == "Annotated":
            return constrained(inner(items[0]), items[1:], module)
        if name in _WRAPPERS:
            return inner(items[0])
        return {}

    def _named_type(self, node: ast.expr, module: Module, depth: int) -> Schema:
        full = module.full(node)
        if full in _UNTYPED:
            return {}
        if full in PLAIN:
            return dict(PLAIN[full])
        short = short_name(node, module)
        if short in _ARRAYS or short in ("tuple", "Tuple"):
            return {"type": "array"}
        if short in _OBJECTS:
            return {"type": "object"}
        found = self.resolver.find(full, module)
        if found is None:
            return {}
        home, name = found
        if name in home.classes:
            return self._class(home.classes[name], home)
        return self.schema(home.values[name], home, depth + 1) if name in home.values else {}

    # ── classes ────────────────────────────────────────────────────────────────────────────────────

    def _class(self, node: ast.ClassDef, module: Module) -> Schema:
        if id(node) in self._named:
            return {"$ref": REF.format(self._named[id(node)])}
        kind = self.resolver.kind_of(node, module)
        if kind in ("", "other"):
            return {}
        name = node.name
        while name in self.schemas:
            name += "_"
        self._named[id(node)] = name
        self.schemas[name] = {}  # a class may hold itself
        self.schemas[name] = self._enum(node, module) if kind == "enum" else self._fields(node, module, kind)
        return {"$ref": REF.format(name)}

    def _enum(self, node: ast.ClassDef, module: Module) -> Schema:
        values = []
        for statement in node.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not name.startswith("_"):
                    said_value, known = constant(value, module)
                    if known:
                        values.append(said_value)
                    elif isinstance(value, ast.Call) and module.full(value.func) == "enum.auto":
                        values.append(name.lower())
        return {"title": node.name, "enum": sorted(values, key=lambda one: (str(type(one)), one))} | _described(node)

    def _fields(self, node: ast.ClassDef, module: Module, kind: str) -> Schema:
        properties: dict[str, Schema] = {}
        required: list[str] = []
        self._gather(node, module, kind, properties, required, 0)
        if kind == "namedtuple":
            values = tuple_of(list(properties.values()))
            del values["items"]
            return {"title": node.name} | values | _described(node)
        schema: Schema = {"title": node.name} | _described(node)
        schema |= {"type": "object", "properties": properties, "required": required}
        if self._closed(node):
            schema["additionalProperties"] = False
        return schema

    def _closed(self, node: ast.ClassDef) -> bool:
        return any(
            keyword.arg == "forbid_unknown_fields" and getattr(keyword.value, "value", None) is True
            for keyword in node.keywords
        )

    def _gather(
        self,
        node: ast.ClassDef,
        module: Module,
        kind: str,
        properties: dict[str, Schema],
        required: list[str],
        depth: int,
    ) -> None:
        """A class's own fields after those of its bases, which they replace."""
        for base in node.bases:
            found = self.resolver.find(module.full(base), module) if depth < DEPTH_MAX else None
            if found is not None and found[1] in found[0].classes:
                self._gather(found[0].classes[found[1]], found[0], kind, properties, required, depth + 1)
        total = not any(keyword.arg == "total" and not _true(keyword.value) for keyword in node.keywords)
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            wrapper = statement.annotation
            outer = short_name(wrapper.value, module) if isinstance(wrapper, ast.Subscript) else ""
            if outer == "ClassVar" or short_name(wrapper, module) == "ClassVar":
                continue
            name, schema = self._field(statement, module)
            needed = statement.value is None or _asks(statement.value, module)
            if kind == "typeddict":
                needed = outer == "Required" or (total and outer != "NotRequired")
            properties[name] = schema
            if name in required:
                required.remove(name)
            if needed:
                required.append(name)

    def _field(self, statement: ast.AnnAssign, module: Module) -> tuple[str, Schema]:
        assert isinstance(statement.target, ast.Name)
        name, schema, value = statement.target.id, self.schema(statement.annotation, module), statement.value
        if value is None:
            return name, schema
        if isinstance(value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}
            for rename in ("alias", "name"):
                text = getattr(given.get(rename), "value", None)
                if isinstance(text, str) and module.full(value.func) in ("pydantic.Field", "msgspec.field"):
                    name = text
            schema = constrained(schema, [value], module)
            value = given.get("default") or (value.args[0] if value.args else None)
        said_value, known = constant(value, module) if value is not None else (None, False)
        return name, schema | {"default": said_value} if known and said_value is not ... else schema


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def _asks(value: ast.expr, module: Module) -> bool:
    """Whether a field with this value on its right has no default all the same: `field()`, `Field(...)`."""
    if not isinstance(value, ast.Call) or module.full(value.func) not in _FIELD_MAKERS:
        return isinstance(value, ast.Constant) and value.value is ...
    if value.args:
        first = value.args[0]
        return isinstance(first, ast.Constant) and first.value is ...
    return not any(keyword.arg in ("default", "default_factory") for keyword in value.keywords)


_FIELD_MAKERS = frozenset(("dataclasses.field", "msgspec.field", "pydantic.Field"))


def _described(node: ast.ClassDef) -> Schema:
    text = ast.get_docstring(node)
    return {"description": text} if text else {}
