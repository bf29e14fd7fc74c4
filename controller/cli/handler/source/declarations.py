"""Finds the functions that a handler file declares, by its syntax tree; nothing of the file is run.

Deploying must not need what the handler needs (torch, a GPU, the secrets of production), and must not do
what the handler does. So the settings are read, not executed: `@function`, `@function(...)`,
`name = function(...)(app)`, `name = LLM(...)` and `name = Transformers(...)` at module level, with values as
`constants.py` reads them. A class that is `Layered` is known by its bases (`layered.py`).
What the settings mean together is decided in `handler/spec.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from fleetstart.runtime.contract.errors import HandlerSyntax, InvalidSpec, NoHandler, NotFound
from fleetstart.runtime.contract.function.tasks import check_task

from .constants import Computed, NotConstant, dotted, evaluate
from .layered import LAYERED, LayeredClasses
from .parse import parse
from .setting_types import VALUES

API = "fleetstart.runtime"

_GENERAL = (
    "name", "weights", "adapter", "memory", "scale", "concurrency", "timeout_s", "retries", "queue_timeout_s",
    "start_timeout_s", "slo", "limits", "max_body", "cors", "network", "isolation", "region", "env", "tags", "include",
    "probe", "schedule", "timezone", "keep_requests", "project", "secrets", "keep", "gpu", "image",
)  # fmt: skip
FUNCTION_SETTINGS = (*_GENERAL, "requirements", "calls", "volumes")
LLM_SETTINGS = (
    *_GENERAL, "engine", "first", "dtype", "max_batch", "max_context", "kv_memory", "threads", "tensor_parallel_size",
    "adapters",
)  # fmt: skip
LAYERED_SETTINGS = (*FUNCTION_SETTINGS, "layers")
TRANSFORMERS_SETTINGS = (*FUNCTION_SETTINGS, "task", "max_tokens", "pooling", "normalize")

Kind = Literal["function", "llm", "layered", "transformers"]
SETTINGS: dict[Kind, tuple[str, ...]] = {
    "function": FUNCTION_SETTINGS,
    "llm": LLM_SETTINGS,
    "layered": LAYERED_SETTINGS,
    "transformers": TRANSFORMERS_SETTINGS,
}
_MAKERS: dict[str, Kind] = {"function": "function", "LLM": "llm", "Transformers": "transformers"}
_MAKER_OF = {kind: maker for maker, kind in _MAKERS.items()}


APPS = ("FastAPI", "Starlette", "Quart", "Litestar", "Sanic", "BlackSheep", "get_asgi_application")
"""Calls that make an ASGI app, in the frameworks that people have."""
GPU_SETTINGS = ("gpus", "num_gpus", "device", "accelerator")
"""Names of `gpu` on other platforms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Declaration of one function: the module's attribute that holds it, and its settings as written."""

    attribute: str
    kind: Kind
    line: int
    settings: Mapping[str, Any]


def read_declarations(path: Path) -> list[Declaration]:
    """Reads all declarations of a file, in order.

    Errors: NotFound, HandlerSyntax, NoHandler, InvalidSpec (each naming file and line).
    """
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise NotFound(f"{path} {what}", hint="name the Python file that holds the handler: fs deploy handler.py")
    source = path.read_bytes()
    tree = parse(source, str(path))
    declarations = _Reader(str(path), tree).read()
    if not declarations:
        put = _app_hint(tree) or "put `@function` above your handler"
        raise NoHandler(f"{path} declares no function", hint=f"add `from fleetstart.runtime import function` and {put}")
    return declarations


def _app_hint(tree: ast.Module) -> str:
    """What to write for an ASGI app that the file makes: a decorator cannot stand above it. Empty without one."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=func)):
                if (made := dotted(func).rpartition(".")[2]) in APPS:
                    return f"write `web = function({name})`: `{name} = {made}(...)` is an app, which is wrapped"
    return ""


@dataclass
class _Reader:
    """Walks the module's statements in order, so that a constant has the value that it has at that line."""

    path: str
    tree: ast.Module
    names: dict[str, object] = field(default_factory=dict)
    makers: dict[str, Kind] = field(default_factory=dict)
    """Dotted names under which this file reaches `function`, `LLM` and `Transformers`."""
    calls: dict[str, Callable[..., Any]] = field(default_factory=dict)
    layered: LayeredClasses = field(default_factory=LayeredClasses)
    found: dict[str, Declaration] = field(default_factory=dict)

    def read(self) -> list[Declaration]:
        try:
            for statement in self.tree.body:
                self._statement(statement)
        except RecursionError as error:
            raise HandlerSyntax(f"{self.path}: nested too deeply to be read") from error
        return list(self.found.values())

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                self._import(statement)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._definition(statement)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assignment(name, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assignment(name, value)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                self._branch(statement)
            case _:
                self._forget_bound(statement)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                self._forget(alias.asname or alias.name.partition(".")[0], statement.lineno)
                if alias.name == API:
                    self._offer(alias.asname or API)
                continue
            bound = alias.asname or alias.name
            self._forget(bound, statement.lineno)
            if statement.module == API and alias.name in _MAKERS:
                self.makers[bound] = _MAKERS[alias.name]
            elif statement.module == API and alias.name in VALUES:
                self.calls[bound] = VALUES[alias.name]
            elif statement.module == API and alias.name == LAYERED:
                self.layered.offer(bound)
            elif statement.module == API and alias.name == "*":
                self._offer("")
            elif f"{statement.module}.{alias.name}" == API:
                self._offer(bound)

    def _offer(self, prefix: str) -> None:
        dot = f"{prefix}." if prefix else ""
        self.makers.update({dot + maker: kind for maker, kind in _MAKERS.items()})
        self.calls.update({dot + name: build for name, build in VALUES.items()})
        self.layered.offer(dot + LAYERED)

    def _definition(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        shape = self.layered.shape_of(statement) if isinstance(statement, ast.ClassDef) else None
        self._forget(statement.name, statement.lineno)
        if shape is not None:
            self.layered.add(statement.name, shape)
        for decorator in statement.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            kind = self.makers.get(dotted(call.func if call else decorator))
            if kind in ("llm", "transformers"):
                maker, more = _MAKER_OF[kind], ', task="text-classification"' if kind == "transformers" else ""
                raise InvalidSpec(
                    f"{self.path}:{decorator.lineno}: {maker} is not a decorator",
                    hint=f'write `{statement.name} = {maker}(weights="./weights"{more})`',
                )
            if kind == "function":
                self._declare(statement.name, self._kind(statement.name, decorator.lineno), decorator.lineno, call)

    def _kind(self, name: str, line: int) -> Kind:
        """Kind of the function under a name. Errors: NoHandler for a layered class that lacks a part."""
        if name not in self.layered:
            return "function"
        self.layered.check(name, f"{self.path}:{line}")
        return "layered"

    def _assignment(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Call() as inner) if self.makers.get(dotted(inner.func)) == "function":
                declared = self._kind(_argument(value), value.lineno)
                self._forget(name, value.lineno)
                self._declare(name, declared, value.lineno, inner)
            case ast.Call(func=func) if (kind := self.makers.get(dotted(func))) is not None:
                self._forget(name, value.lineno)
                if kind == "function" and not value.args:
                    raise InvalidSpec(
                        f"{self.path}:{value.lineno}: function(...) is given no handler",
                        hint=f"write `{name} = function(...)(app)`, or `@function(...)` above a function or class",
                    )
                self._declare(name, kind, value.lineno, value, positional=kind == "function")
            case _:
                self._forget(name, value.lineno)
                try:
                    self.names[name] = evaluate(value, self.names, self.calls)
                except (NotConstant, InvalidSpec):
                    self.names[name] = Computed(value.lineno)

    def _branch(self, statement: ast.stmt) -> None:
        """Reads imports inside a branch, and rejects a function that may or may not be declared."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for node in ast.walk(statement):
            decorators = getattr(node, "decorator_list", [])
            for decorator in [*decorators, *([node.value] if isinstance(node, ast.Assign) else [])]:
                head = decorator.func if isinstance(decorator, ast.Call) else decorator
                if dotted(head) in self.makers:
                    raise InvalidSpec(
                        f"{self.path}:{decorator.lineno}: a function declared inside another statement is not read",
                        hint="move it to the module level, so that it is declared in every case",
                    )
        self._forget_bound(statement)

    def _forget_bound(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                self._forget(node.id, statement.lineno)

    def _forget(self, name: str, line: int) -> None:
        """Drops a name that is bound to something else from here on."""
        self.names[name] = Computed(line)
        self.makers.pop(name, None)
        self.calls.pop(name, None)
        self.layered.forget(name)
        self.found.pop(name, None)

    def _declare(
        self, attribute: str, kind: Kind, line: int, call: ast.Call | None, *, positional: bool = False
    ) -> None:
        settings: dict[str, Any] = {}
        maker = _MAKER_OF.get(kind, "function")
        if call is not None:
            if call.args and not positional:
                raise InvalidSpec(f"{self.path}:{call.lineno}: {maker}(...) takes settings by name only")
            for keyword in call.keywords:
                settings[self._known(keyword, kind, maker)] = self._setting(keyword, maker)
        if kind == "transformers":
            self._check_task(settings, line)
        self.found[attribute] = Declaration(attribute=attribute, kind=kind, line=line, settings=settings)

    def _check_task(self, settings: dict[str, Any], line: int) -> None:
        try:
            check_task(settings)
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.path}:{line}: {error.message}", hint=error.hint) from error

    def _known(self, keyword: ast.keyword, kind: Kind, maker: str) -> str:
        allowed = SETTINGS[kind]
        if keyword.arg is None:
            raise InvalidSpec(f"{self.path}:{keyword.value.lineno}: {maker}(**...) is not read; name each setting")
        if keyword.arg not in allowed:
            near = get_close_matches(keyword.arg, allowed, n=1)
            if keyword.arg in GPU_SETTINGS:
                raise InvalidSpec(
                    f"{self.path}:{keyword.value.lineno}: {maker}() has no setting {keyword.arg!r}: devices are "
                    "asked for as gpu",
                    hint='write gpu=1, gpu="H100:2", or a share of one by memory: gpu="24GiB"',
                )
            if keyword.arg == "layers":
                raise InvalidSpec(
                    f"{self.path}:{keyword.value.lineno}: layers= is of a class that is Layered",
                    hint="write `class Model(Layered): ...` under it, or leave it out",
                )
            raise InvalidSpec(
                f"{self.path}:{keyword.value.lineno}: {maker}() has no setting {keyword.arg!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(allowed)}",
            )
        return keyword.arg

    def _setting(self, keyword: ast.keyword, maker: str) -> Any:
        try:
            return evaluate(keyword.value, self.names, self.calls)
        except NotConstant as error:
            raise InvalidSpec(
                f"{self.path}:{error.line or keyword.value.lineno}: {maker}({keyword.arg}=...): {error.reason}",
                hint="settings are read without running the file: use literals, constants or arithmetic on them",
            ) from error
        except InvalidSpec as error:
            raise InvalidSpec(
                f"{self.path}:{keyword.value.lineno}: {maker}({keyword.arg}=...): {error.message}", hint=error.hint
            ) from error


def _argument(call: ast.Call) -> str:
    """The name that is its only argument, if it is one."""
    return dotted(call.args[0]) if len(call.args) == 1 else ""
