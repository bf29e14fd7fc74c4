"""Settings of a function from three origins: its declaration, `fs.toml` beside it, and flags. The later one wins.

`fs.toml` has settings for all functions of its folder at the top, and for one under `[function.NAME]`, NAME being the
function's or the handler's own. Tables (`scale`, `slo`, `limits`, `env`, `tags`, `adapters`) are merged key by key, all
else is replaced.
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
TABLES = ("scale", "slo", "limits", "env", "tags", "adapters")
GENERAL = tuple(dict.fromkeys(name for names in SETTINGS.values() for name in names if name != "name"))
"""Settings allowed at the top of `fs.toml`: those that one kind of function does not have are for the others."""

Key = tuple[str, ...]
"""("memory",), or ("env", "TOKEN") inside a table."""


class Setting(NamedTuple):
    """Value of a setting, and its origin."""

    value: Any
    origin: str
    """"decorator", "fs.toml" or "flag"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """Content of `fs.toml`; empty if there is none."""

    path: Path
    general: Mapping[str, Any] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, declaration: Declaration) -> dict[Key, Any]:
        """Settings for one declaration. Errors: InvalidSpec for one that a function of this kind does not have."""
        known = SETTINGS[declaration.kind]
        found = flatten({name: value for name, value in self.general.items() if name in known})
        for name in self.names(declaration):
            table = self.functions.get(name, {})
            for key in table:
                _check_known(f"{self.path}: [function.{name}]", key, known)
            found.update(flatten(table))
        return found

    def names(self, declaration: Declaration) -> list[str]:
        """Names of the tables for one declaration; the later one wins."""
        name = declaration.settings.get("name") or default_name(declaration.attribute)
        return list(dict.fromkeys([declaration.attribute, str(name)]))


def read_settings_file(folder: Path) -> SettingsFile:
    """Reads `fs.toml` of a folder. Errors: InvalidSpec, naming the file, and the line or the setting."""
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
    """Opens tables: {"env": {"A": 1}} → {("env", "A"): 1}. Defaults inside a decorator's `Scale`, `SLO` or `Limits` are
    left out, as nobody set them."""
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
    """Closes tables: the opposite of `flatten`."""
    found: dict[str, Any] = {}
    for (name, *part), value in values.items():
        if not part:
            found[name] = value
        else:
            table = found.get(name)
            found[name] = {**(table if isinstance(table, dict) else {}), part[0]: value}
    return found


def merge_settings(declaration: Declaration, file: SettingsFile, flags: Mapping[str, Any]) -> dict[Key, Setting]:
    """All settings made for a declaration, each with its last origin."""
    found: dict[Key, Setting] = {}
    for origin, values in (
        (DECORATOR, flatten(declaration.settings)),
        (FILE, file.of(declaration)),
        (FLAG, flatten(flags)),
    ):
        found.update({key: Setting(value, origin) for key, value in values.items()})
    return found


def apply_settings(declaration: Declaration, settings: Mapping[Key, Setting]) -> Declaration:
    """The declaration with the merged settings in place of its own."""
    values = unflatten({key: setting.value for key, setting in settings.items()})
    return dataclasses.replace(declaration, settings=msgspec.to_builtins(values))
