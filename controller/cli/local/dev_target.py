"""The functions that `fs dev` has on a system that others use: their names, and the tag by which they are known.

What somebody else deployed under such a name is neither taken over nor removed; what a killed `fs dev` left, is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from fleetstart.runtime.contract.errors import InvalidSpec, NotFound, Refused

from ...schemas.access import ProjectInfo, ProjectTerms, SecretInfo, SecretValue
from ...schemas.functions import FunctionInfo
from ...state.access_records import DEFAULT
from ..api_client import ApiClient, function_path
from ..handler.source.declarations import Declaration
from ..handler.spec import default_name

SUFFIX = "-dev"
NAME_MAX = 63
TAG = "fs-dev"


def with_dev_name(declaration: Declaration) -> Declaration:
    """Under a name of its own, so that it takes no calls away from what is deployed, and with the tag."""
    name = str(declaration.settings.get("name") or default_name(declaration.attribute))
    settings = {**declaration.settings, "name": name[: NAME_MAX - len(SUFFIX)] + SUFFIX}
    tags = settings.get("tags", {})
    if isinstance(tags, Mapping):  # what else it is, the deploy refuses
        settings["tags"] = {**tags, TAG: "yes"}
    return replace(declaration, settings=settings)


def dev_name(declaration: Declaration) -> str:
    return str(declaration.settings["name"])


def belongs_to_others(server: ApiClient, name: str) -> bool:
    """Whether there is such a function, and no `fs dev` made it."""
    try:
        return TAG not in server.get(function_path(name), FunctionInfo).spec.tags
    except NotFound:
        return False


def require_own(server: ApiClient, name: str) -> None:
    """Errors: Refused."""
    if belongs_to_others(server, name):
        raise Refused(
            f"function {name} at {server.url} is none that `fs dev` made, and stays as it is",
            hint=f"choose another name with --name, or remove it with `fs rm {name}`",
        )


def create_secrets(server: ApiClient, declarations: Sequence[Declaration], environ: Mapping[str, str]) -> None:
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
