"""Secrets and projects of a handler that `fs dev` serves: its system is new, so they come from the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from fleetstart.runtime.contract.errors import InvalidSpec

from ...schemas.resources import ProjectInfo, ProjectTerms, SecretInfo, SecretValue
from ...state.access_records import DEFAULT
from ..api_client import Server
from ..handler.source.declarations import Declaration


def provide(server: Server, declarations: Sequence[Declaration], environ: Mapping[str, str]) -> None:
    """Errors: InvalidSpec for a secret that is not in the environment; those of the server."""
    for declaration in declarations:
        project = str(declaration.settings.get("project") or DEFAULT)
        if project != DEFAULT:
            server.put(f"/api/v1/projects/{quote(project, safe='')}", ProjectTerms(), ProjectInfo)
        names = declaration.settings.get("secrets") or ()
        for name in names if isinstance(names, list | tuple) else ():
            if name not in environ:
                raise InvalidSpec(
                    f"{declaration.attribute}: secret {name} is not in the environment, where `fs dev` looks for it",
                    hint=f"export {name}=... before `fs dev`",
                )
            path = f"/api/v1/secrets/{quote(project, safe='')}/{quote(str(name), safe='')}"
            server.put(path, SecretValue(environ[str(name)]), SecretInfo)
