"""Selects the functions of a handler file that a command names, with their settings from file, `fs.toml` and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleetstart.runtime.contract.errors import InvalidSpec, NoHandler

from .. import output
from .settings import Key, Setting, SettingsFile, apply_settings, merge_settings, read_settings_file
from .source.declarations import Declaration, read_declarations
from .spec import default_name, module_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredHandler:
    """One function of a handler file with its merged settings."""

    declaration: Declaration
    """The declaration with the settings of all origins."""
    settings: Mapping[Key, Setting]


def select_handlers(handler: str, flags: Mapping[str, Any]) -> tuple[Path, list[ConfiguredHandler]]:
    """Reads `handler.py` or `handler.py:Name`: the file's path and its functions. Errors: those of reading it;
    click.UsageError."""
    file, _, wanted = handler.rpartition(":") if ":" in handler and not Path(handler).exists() else (handler, "", "")
    path = Path(file)
    declarations = read_declarations(path)
    module_name(path)
    settings = read_settings_file(path.parent)
    _warn_unused(settings, declarations, path)
    if wanted:
        chosen = [declaration for declaration in declarations if declaration.attribute == wanted]
        if not chosen:
            names = ", ".join(declaration.attribute for declaration in declarations)
            raise NoHandler(f"{path} declares no function {wanted!r}", hint=f"it declares {names}")
        declarations = chosen
    if "name" in flags and len(declarations) > 1:
        names = ", ".join(f"{file}:{declaration.attribute}" for declaration in declarations)
        raise click.UsageError(f"--name fits one function, {path} declares {len(declarations)}: choose one of {names}")
    handlers = [_settled(declaration, settings, flags) for declaration in declarations]
    _require_names(handlers, path)
    return path, handlers


def _require_names(handlers: Sequence[ConfiguredHandler], path: Path) -> None:
    """Errors: InvalidSpec, if two functions have one name: each would be a version of the other."""
    seen: dict[tuple[str, str], Declaration] = {}
    for declaration in (one.declaration for one in handlers):
        settings = declaration.settings
        name = str(settings.get("name") or default_name(declaration.attribute))
        first = seen.setdefault((str(settings.get("project") or ""), name), declaration)
        if first is not declaration:
            raise InvalidSpec(
                f"{path}:{declaration.line}: {declaration.attribute} has the name {name!r}, as {first.attribute} in "
                f"line {first.line} has",
                hint="give one of them another name: @function(name=...)",
            )


def _settled(declaration: Declaration, file: SettingsFile, flags: Mapping[str, Any]) -> ConfiguredHandler:
    settings = merge_settings(declaration, file, flags)
    return ConfiguredHandler(declaration=apply_settings(declaration, settings), settings=settings)


def _warn_unused(file: SettingsFile, declarations: Sequence[Declaration], path: Path) -> None:
    """Names tables of `fs.toml` that fit no function: they may be for another file of the folder, or misspelt."""
    used = {name for declaration in declarations for name in file.names(declaration)}
    for name in sorted(file.functions.keys() - used):
        output.message(f"{file.path} has settings for {name[:80]!r}, which {path} does not declare")


def flags_of(
    *,
    name: str | None,
    memory: str | None,
    concurrency: int | None,
    timeout_s: float | None,
    retries: int | None,
    queue_timeout_s: float | None,
    rate: float | None,
    burst: int | None,
    concurrent: int | None,
    max_body: str | None,
    cors: Sequence[str],
    min_workers: int | None,
    max_workers: int | None,
    keep_alive_s: float | None,
    standby_s: float | None,
    env: Sequence[str],
    tags: Sequence[str],
    project: str | None = None,
    image: str | None = None,
    region: Sequence[str] = (),
    calls: Sequence[str] = (),
    keep: str | None = None,
    gpu: str | None = None,
    isolation: str | None = None,
) -> dict[str, Any]:
    """The settings that command line flags stand for."""
    scale = {"min": min_workers, "max": max_workers, "keep_alive_s": keep_alive_s, "standby_s": standby_s}
    limits = {"rate": rate, "burst": burst, "concurrent": concurrent}
    given: dict[str, Any] = {
        "name": name,
        "memory": memory,
        "concurrency": concurrency,
        "timeout_s": timeout_s,
        "retries": retries,
        "queue_timeout_s": queue_timeout_s,
        "limits": {key: value for key, value in limits.items() if value is not None} or None,
        "max_body": max_body,
        "cors": list(cors) or None,
        "scale": {key: value for key, value in scale.items() if value is not None} or None,
        "env": _pairs("--env", env) or None,
        "tags": _pairs("--tag", tags) or None,
        "project": project,
        "image": image,
        "region": list(region) or None,
        "calls": list(calls) or None,
        "keep": keep,
        "gpu": gpu,
        "isolation": isolation,
    }
    return {key: value for key, value in given.items() if value is not None}


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given]
    for pair in pairs:
        if not pair[0] or not pair[1]:
            raise click.UsageError(f"{option} {pair[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in pairs}
