"""The table of settings by the places where they may be written: decorator, `fs.toml`, flag, and the default.

Each row is made from one example value. A test reads the three places of each row with the reader that a deploy uses,
and holds that they mean the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import click
import msgspec

from fleetstart.controller.cli.handler.spec import LLM_MEMORY_BYTES
from fleetstart.runtime.contract.function.spec import SLO, FunctionSpec, Limits, LLMSettings, Scale

Kind = Literal["function", "llm", "layered", "transformers"]

MIB = 1024 * 1024
TABLES: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "scale": ("Scale", Scale),
    "slo": ("SLO", SLO),
    "limits": ("Limits", Limits),
}
"""Settings that are tables: the class that stands for one in a decorator."""
FLAG_OF = {"timeout_s": "--timeout", "queue_timeout_s": "--queue-timeout", "min": "--min", "max": "--max",
           "keep_alive_s": "--keep-alive", "standby_s": "--standby", "tags": "--tag"}  # fmt: skip
"""Flags that are named otherwise than their setting."""
FIELD_OF = {"memory": "memory_bytes", "max_body": "max_body_bytes", "max_context": "max_context_tokens",
            "kv_memory": "kv_memory_bytes"}  # fmt: skip
"""Fields of a spec that are named otherwise than their setting."""
DEFAULTS = {
    "name": "the handler's, in kebab-case",
    "project": "that of the key, or `default`",
    "task": "required",
    "engine": '`"auto"`',
    "dtype": '`"fp32"`, other engines, and with `gpu`: `"auto"`',
    "kv_memory": '`256MiB`, with `gpu`: `"auto"`',
    "max_tokens": "the model's",
    "pooling": '`"mean"`',
    "normalize": "`true`",
    "layers": "usual names",
    "include": "none",
    "requirements": "a file beside the handler",
    "timezone": "UTC",
    "queue_timeout_s": "the call's deadline",
    "region": "anywhere",
    "max_body": "the gateway's limit",
    "concurrency": "`1`; `LLM`: 2 × `max_batch`; `Transformers`: 16",
    "probe": "none; `LLM`: its models route",
    "retries": "`0`; `LLM`: `2`",
    "threads": "all of the worker",
}
"""Defaults that are no constant of the spec, or that need a word."""


@dataclass(frozen=True, slots=True)
class Example:
    """One setting with a value that may stand in each place."""

    name: str
    """Of the setting, `scale.min` for one in a table."""
    value: Any
    kind: Kind = "function"
    beside: str = ""
    """What a decorator must have next to it, such as a rate beside a burst."""

    @property
    def path(self) -> list[str]:
        return self.name.split(".")

    @property
    def decorator(self) -> str:
        name, *part = self.path
        if part:
            return f"{name}={TABLES[name][0]}({self.beside}{part[0]}={_python(self.value)})"
        return f"{name}={_python(self.value)}"

    @property
    def toml(self) -> str:
        """Empty for the name: `fs.toml` has it as the table's."""
        return "" if self.name == "name" else f"{self.name} = {_toml(self.value)}"

    @property
    def flag(self) -> str:
        """As it is typed; empty if there is none."""
        last = self.path[-1]
        flag = FLAG_OF.get(last, f"--{last.replace('_', '-')}")
        if flag not in _flags() or self.name == "probe":  # `--probe` is a choice of the deploy, not the setting
            return ""
        values = self.value if isinstance(self.value, list) else [self.value]
        if isinstance(self.value, dict):
            values = [f"{key}={value}" for key, value in self.value.items()]
        return " ".join(f"{flag} {_number(value) or value}" for value in values)

    @property
    def default(self) -> str:
        name, *part = self.path
        if self.name in DEFAULTS:
            return DEFAULTS[self.name]
        kind: type[msgspec.Struct] = TABLES[name][1] if part else FunctionSpec
        if self.kind == "llm" and not part and name != "adapters":
            kind = LLMSettings
        field = part[0] if part else FIELD_OF.get(name, name)
        default = {one.name: one for one in msgspec.structs.fields(kind)}[field]
        value = default.default if default.default is not msgspec.NODEFAULT else default.default_factory()
        if self.name == "memory":
            return f"{_size(value)}; `LLM`, `Transformers`: {_size(LLM_MEMORY_BYTES)}"
        if field.endswith("_bytes"):
            return _size(value)
        return "none" if value in (None, "", [], {}) else f"`{_toml(value)}`"


EXAMPLES = (
    Example("name", "greet"),
    Example("memory", "1GiB"),
    Example("gpu", "24GiB"),
    Example("concurrency", 4),
    Example("timeout_s", 30.0),
    Example("retries", 2),
    Example("start_timeout_s", 60.0),
    Example("env", {"MODE": "fast"}),
    Example("secrets", ["TOKEN"]),
    Example("volumes", ["index", "cache:rw"]),
    Example("include", ["data/*.json"]),
    Example("requirements", ["regex==2024.11.6"]),
    Example("network", ["api.example.com"]),
    Example("calls", ["embed"]),
    Example("isolation", "gvisor"),
    Example("image", "app:1.2"),
    Example("region", ["eu"]),
    Example("probe", "/healthz"),
    Example("scale.min", 1),
    Example("scale.max", 8),
    Example("scale.keep_alive_s", 300.0),
    Example("scale.standby_s", 3600.0, "llm"),
    Example("slo.ttft_s", 2.0),
    Example("slo.tpot_s", 0.2, "llm"),
    Example("queue_timeout_s", 5.0),
    Example("limits.rate", 100.0),
    Example("limits.burst", 200, beside="rate=100, "),
    Example("limits.concurrent", 50),
    Example("max_body", "1MiB"),
    Example("cors", ["https://app.example.com"]),
    Example("weights", "./weights"),
    Example("adapter", "./adapter"),
    Example("keep", "host"),
    Example("layers", "blocks.{}", "layered"),
    Example("engine", "transformers", "llm"),
    Example("first", "native", "llm"),
    Example("dtype", "bf16", "llm"),
    Example("max_batch", 16, "llm"),
    Example("max_context", 4096, "llm"),
    Example("kv_memory", "1GiB", "llm"),
    Example("threads", 4, "llm"),
    Example("tensor_parallel_size", 2, "llm"),
    Example("adapters", {"sql": "./sql"}, "llm"),
    Example("task", "embedding", "transformers"),
    Example("max_tokens", 256, "transformers"),
    Example("pooling", "cls", "transformers"),
    Example("normalize", False, "transformers"),
    Example("schedule", "*/5 * * * *"),
    Example("timezone", "Europe/Berlin"),
    Example("keep_requests", True),
    Example("tags", {"team": "search"}),
    Example("project", "search"),
)


def markdown_table() -> str:
    lines = ["| setting | decorator | `fs.toml` | flag | default |", "| --- | --- | --- | --- | --- |"]
    for one in EXAMPLES:
        cells = [one.name, one.decorator, one.toml or "[function.greet]", one.flag]
        shown = " | ".join(f"`{cell}`" if cell else "–" for cell in cells)
        lines.append(f"| {shown} | {one.default} |")
    return "\n".join(lines)


def _flags() -> set[str]:
    command: click.Command = import_module("fleetstart.controller.cli.commands.deploy").command
    return {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}


def _python(value: Any) -> str:
    return repr(value) if isinstance(value, bool) else _number(value) or json.dumps(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return _number(value) or json.dumps(value)


def _number(value: Any) -> str:
    """30 rather than 30.0; empty for what is no number with a fraction."""
    return f"{value:g}" if isinstance(value, float) else ""


def _size(value: int) -> str:
    return f"`{value // (1024 * MIB)}GiB`" if value % (1024 * MIB) == 0 and value else f"`{value // MIB}MiB`"
