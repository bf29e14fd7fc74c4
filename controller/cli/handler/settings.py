"""A function's settings from three places: what its file declares, `fs.toml` beside it, and flags. The later wins.

`fs.toml` has settings for all functions of its folder at the top, and for one under `[function.NAME]`, NAME being the
function's or the handler's own. Tables (`scale`, `slo`, `limits`, `env`, `tags`) are merged key by key, all else is
replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale

from .source.declarations import SETTINGS, Declaration
from .spec import default_name

FILE = "fs.toml"
FILE_MAX_BYTES = 64 * 1024
DECORATOR, FLAG = "decorator", "flag"
TABLES = ("scale", "slo", "limits", "env", "tags")
GENERAL = tuple(dict.fromkeys(name for names in SETTINGS.values() for name in names if name != "name"))
"""What may stand at the top: those that a function does not have are for the others."""

Key = tuple[str, ...]
"""("memory",), or ("env", "TOKEN") inside a table."""


class Setting(NamedTuple):
    value: Any
    origin: str
    """Where it comes from: "decorator", "fs.toml" or "flag"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """What `fs.toml` says; empty where there is none."""

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, declaration: Declaration) -> dict[Key, Any]:
        """Errors: InvalidSpec for a setting that a function of this kind does not have."""
        known = SETTINGS[declaration.kind]
        found = flatten({name: value for name, value in self.general.items() if name in known})
        for name in self.names(declaration):
            table = self.functions.get(name, {})
            for key in table:
                _check_known(f"{self.path}: [function.{name}]", key, known)
            found.update(flatten(table))
        return found

    def names(self, declaration: Declaration) -> list[str]:
        """Under which its table may stand; the later one wins."""
        name = declaration.settings.get("name") or default_name(declaration.attribute)
        return list(dict.fromkeys([declaration.attribute, str(name)]))


def read_settings_file(folder: Path) -> SettingsFile:
    """Errors: InvalidSpec, naming the file, and the line or the setting."""
    import tomllib  # late: most verbs do not need it

    path = folder / FILE
    if not path.exists():
        return SettingsFile(path=path)
    try:
        data = path.read_bytes()
        if len(data) > FILE_MAX_BYTES:
            raise InvalidSpec(f"{path} has {len(data)} bytes, {FILE_MAX_BYTES} at most")
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise InvalidSpec(f"{path} cannot be read: {error}", hint="it must be TOML: https://toml.io") from error
    functions = content.pop("function", {})
    if not isinstance(functions, dict) or not all(isinstance(table, dict) for table in functions.values()):
        raise InvalidSpec(f"{path}: function is no table of tables", hint='write [function.chat], then memory = "2GiB"')
    for key in content:
        _check_known(str(path), key, GENERAL)
    return SettingsFile(path=path, general=content, functions=functions)


def _check_known(where: str, key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(known)}"
    if key == "name":
        hint = "give each function its own: [function.NAME]"
    raise InvalidSpec(f"{where} has no setting {key[:80]!r} there", hint=hint)


def flatten(values: Mapping[str, Any]) -> dict[Key, Any]:
    """Tables opened; what a `Scale`, `SLO` or `Limits` of a decorator leaves at its default was not said there."""
    found: dict[Key, Any] = {}
    for name, value in values.items():
        if isinstance(value, Scale | SLO | Limits):
            plain = None if isinstance(value, SLO) else type(value)()
            value = {
                part: getattr(value, part)
                for part in value.__struct_fields__
                if getattr(value, part) != getattr(plain, part, None)
            }
        if name in TABLES and isinstance(value, Mapping):
            found.update({(name, str(part)): item for part, item in value.items()})
        else:
            found[(name,)] = value
    return found


def unflatten(values: Mapping[Key, Any]) -> dict[str, Any]:
    """The opposite of `flatten`."""
    found: dict[str, Any] = {}
    for (name, *part), value in values.items():
        if not part:
            found[name] = value
        else:
            table = found.get(name)
            found[name] = {**(table if isinstance(table, dict) else {}), part[0]: value}
    return found


def merge_settings(declaration: Declaration, file: SettingsFile, flags: Mapping[str, Any]) -> dict[Key, Setting]:
    """Every setting that somebody made, and who made it last."""
    found: dict[Key, Setting] = {}
    for origin, values in (
        (DECORATOR, flatten(declaration.settings)),
        (FILE, file.of(declaration)),
        (FLAG, flatten(flags)),
    ):
        found.update({key: Setting(value, origin) for key, value in values.items()})
    return found


def apply_settings(declaration: Declaration, settings: Mapping[Key, Setting]) -> Declaration:
    """The declaration as if all of it stood in the handler's file."""
    values = unflatten({key: setting.value for key, setting in settings.items()})
    return dataclasses.replace(declaration, settings=msgspec.to_builtins(values))
