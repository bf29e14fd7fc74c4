"""Functions that `fs dev` deploys to a shared system: their names, and the tag that marks them.

A function of that name without the tag is neither replaced nor removed; one that a killed `fs dev` left behind is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote

from fleetstart.runtime.contract.errors import InvalidSpec, NotFound, Refused
from fleetstart.runtime.contract.function.names import NAME_MAX, full_name

from ...schemas.access import ProjectInfo, ProjectTerms, SecretInfo, SecretValue
from ...schemas.functions import FunctionInfo
from ...state.access_records import DEFAULT
from ..api_client import ApiClient, function_path
from ..handler.source.declarations import Declaration
from ..handler.spec import default_name

SUFFIX = "-dev"
TAG = "fs-dev"


def with_dev_name(declaration: Declaration) -> Declaration:
    """The declaration with a name of its own, so that it takes no calls from the deployed function, and the tag."""
    written = str(declaration.settings.get("name") or default_name(declaration.attribute))
    project, dot, name = written.rpartition(".")
    settings = {**declaration.settings, "name": project + dot + name[: NAME_MAX - len(SUFFIX)] + SUFFIX}
    tags = settings.get("tags", {})
    if isinstance(tags, Mapping):  # the deploy rejects anything else
        settings["tags"] = {**tags, TAG: "yes"}
    return replace(declaration, settings=settings)


def dev_name(declaration: Declaration) -> str:
    """Its name with the project, if it names one; else the server finds the project by the key."""
    name, project = str(declaration.settings["name"]), declaration.settings.get("project")
    return full_name(name, str(project)) if project else name


def belongs_to_others(server: ApiClient, name: str) -> bool:
    """Checks whether a function of that name exists that `fs dev` did not deploy."""
    try:
        return TAG not in server.get(function_path(name), FunctionInfo).spec.tags
    except NotFound:
        return False


def require_own(server: ApiClient, name: str) -> None:
    """Checks that the name is free for `fs dev`. Errors: Refused."""
    if belongs_to_others(server, name):
        raise Refused(
            f"function {name} at {server.url} was not deployed by `fs dev`, and is left as it is",
            hint=f"choose another name with --name, or remove it with `fs rm {name}`",
        )


def create_secrets(server: ApiClient, declarations: Sequence[Declaration], environ: Mapping[str, str]) -> None:
    """Creates the projects and secrets of declarations; values are from the environment.

    Errors: InvalidSpec for a secret that is not in the environment; those of the server.
    """
    for declaration in declarations:
        project = str(declaration.settings.get("project") or DEFAULT)
        if project != DEFAULT:
            server.put(f"/api/v1/projects/{quote(project, safe='')}", ProjectTerms(), ProjectInfo)
        names = declaration.settings.get("secrets") or ()
        for name in names if isinstance(names, list | tuple) else ():
            if name not in environ:
                raise InvalidSpec(
                    f"{declaration.attribute}: secret {name} is not in the environment, from which `fs dev` takes it",
                    hint=f"export {name}=... before `fs dev`",
                )
            path = f"/api/v1/secrets/{quote(project, safe='')}/{quote(str(name), safe='')}"
            server.put(path, SecretValue(environ[str(name)]), SecretInfo)
