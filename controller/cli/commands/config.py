"""`fs config`: the settings of a handler's functions, each with its origin, and where the live version has another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName

from ...schemas.functions import FunctionInfo
from .. import output
from ..api_client import ApiClient, find_server, function_path
from ..command_group import CommandGroup
from ..completions import files
from ..handler.select import ConfiguredHandler, flags_of, select_handlers
from ..handler.setting_flags import setting_flags
from ..handler.settings import DECORATOR, Key, Setting, flatten
from ..handler.source.declarations import SETTINGS, Kind
from ..handler.spec import adapter_of, adapters_of, build_spec, include_of, module_name, weights_of
from ..root import verb

DEFAULT = "default"
NOT_SET = "not set"
LIVE_TIMEOUT_S = 3.0
"""A server that is slower than that is left out: the settings themselves need none."""
NOT_COMPARED = ("name", "weights", "adapter", "adapters", "include", "layers", "requirements", "task", "engine")
"""Settings of which the spec has the result alone, such as the checkpoint of a folder."""
_FIELDS = {"memory": "memory_bytes", "max_body": "max_body_bytes"}
_OF_ENGINE = {"max_context": "max_context_tokens", "kv_memory": "kv_memory_bytes"}
_SIZES = ("memory", "kv_memory", "max_body")


@click.group(cls=CommandGroup, context_settings={"max_content_width": 100})
def command() -> None:
    """Settings of a handler's functions. Flags win over fs.toml, fs.toml over the decorator; takes --json."""


@command.command
@click.argument("handler", metavar="HANDLER.PY[:NAME]", shell_complete=files)
@setting_flags
@verb()
@click.pass_obj
def show(home: Path, /, *, handler: str, url: str | None, as_json: bool, **flags: Any) -> None:
    """Print each setting, its value and its origin; takes the flags of `fs deploy`.

    It needs no server. If one runs, the column LIVE has what the function's live version has instead: a deploy without
    the flags of an earlier one takes them back.
    """
    path, handlers = select_handlers(handler, flags_of(**flags))
    found, live = {}, {}
    for one in handlers:
        spec = _checked(one, module_name(path))
        name = str(spec.name)
        found[name] = settings = settings_with_defaults(one, spec)
        served = _live_spec(spec.name, url, home)
        live[name] = differences(one.declaration.kind, spec, served) if served is not None else {}
        settings |= {key: Setting(None, NOT_SET) for key in live[name] if key not in settings}
    if as_json:
        output.json_data({name: _as_data(settings, live[name]) for name, settings in found.items()})
        return
    for name, settings in found.items():
        others = live[name]
        rows = [
            (
                ".".join(key),
                _text(setting.value),
                _origin(setting, path.name),
                _text(others[key]) if key in others else "",
            )
            for key, setting in settings.items()
        ]
        heads = (name.upper() if len(found) == 1 else name, "VALUE", "FROM", "LIVE")
        width = len(heads) if others else len(heads) - 1
        output.data(output.table(heads[:width], [row[:width] for row in rows]))


def _live_spec(name: FunctionName, url: str | None, home: Path) -> FunctionSpec | None:
    """The spec of the live version; None without a server, a key or such a function."""
    try:
        with ApiClient(find_server(url, home), timeout_s=LIVE_TIMEOUT_S) as server:
            return server.get(function_path(name), FunctionInfo).spec
    except FleetError:
        return None


def differences(kind: Kind, spec: FunctionSpec, live: FunctionSpec) -> dict[Key, Any]:
    """Settings that the live version has otherwise, with its values; None for one that it lacks."""
    mine, theirs = _values(kind, spec), _values(kind, live)
    return {key: theirs.get(key) for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)}


def _values(kind: Kind, spec: FunctionSpec) -> Mapping[Key, Any]:
    return flatten({name: _default(name, spec) for name in SETTINGS[kind] if name not in NOT_COMPARED})


def _checked(handler: ConfiguredHandler, module: str) -> FunctionSpec:
    """The spec that `fs deploy` would send, with placeholders for bundle and weights. Errors: InvalidSpec."""
    declaration = handler.declaration
    include_of(declaration)
    adapter = adapter_of(declaration)
    return build_spec(
        declaration,
        module=module,
        bundle=BundleId("0" * 64),
        weights=CheckpointId("0" * 64) if weights_of(declaration) else None,
        adapter=CheckpointId("1" * 64) if adapter else None,
        adapters={
            name: CheckpointId(f"{number:064x}") for number, name in enumerate(adapters_of(declaration), start=2)
        },
        imports=(),
        overrides={},
    )


def settings_with_defaults(handler: ConfiguredHandler, spec: FunctionSpec) -> dict[Key, Setting]:
    """All settings in the order of the documentation; those that were not made have their default."""
    defaults = flatten({name: value for name in SETTINGS[handler.declaration.kind] for value in [_default(name, spec)]})
    order = {name: number for number, name in enumerate(SETTINGS[handler.declaration.kind])}
    found = {key: Setting(value, DEFAULT) for key, value in defaults.items()} | dict(handler.settings)
    return {key: found[key] for key in sorted(found, key=lambda key: (order[key[0]], key[1:]))}


def _default(name: str, spec: FunctionSpec) -> Any:
    """Default of a setting, as the spec has it."""
    holder = spec.llm if spec.llm is not None and hasattr(spec.llm, _OF_ENGINE.get(name, name)) else spec
    value = getattr(holder, _OF_ENGINE.get(name, _FIELDS.get(name, name)), None)
    if name in ("weights", "adapter", "adapters", "include", "layers"):
        return None
    if name == "engine":
        return "auto"
    if name == "max_body" and not value:
        return None  # as large as the gateway takes
    if name == "kv_memory" and not value:
        return "auto"
    if name in _SIZES and isinstance(value, int):
        return output.format_size(value).replace(" ", "").replace(".0", "")
    return msgspec.to_builtins(value)


def _as_data(settings: Mapping[Key, Setting], live: Mapping[Key, Any]) -> dict[str, dict[str, Any]]:
    return {
        ".".join(key): {"value": setting.value, "from": setting.origin, **({"live": live[key]} if key in live else {})}
        for key, setting in settings.items()
    }


def _origin(setting: Setting, file: str) -> str:
    return f"{DECORATOR} in {file}" if setting.origin == DECORATOR else setting.origin


def _text(value: Any) -> str:
    return "-" if value is None or value == [] or value == {} else value if isinstance(value, str) else repr(value)
