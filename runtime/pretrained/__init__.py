"""Models of Hugging Face transformers as handlers: a class a task, for a handler file's `Transformers(...)`.

`create_handler` makes the handler, `with_openai_routes` its app. Importing the package is cheap; transformers is
imported when a handler is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..contract.errors import StartFailed
from ..contract.function.tasks import check_task
from ..worker_io.asgi import App

__all__ = ["create_handler", "with_openai_routes"]


def create_handler(settings: Mapping[str, Any]) -> Any:
    """A handler object with `load(weights)` and a typed `__call__`. `settings`: those of the declaration.

    Errors: InvalidSpec for settings that do not fit the task, StartFailed if transformers is not installed.
    """
    task = check_task(dict(settings))
    try:
        module = import_module(f".{task.module}", __name__)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "torch", "PIL", "soundfile", "soxr"):
            raise
        raise StartFailed(
            f"Transformers(task={settings['task']!r}) needs {error.name}, which is not installed where functions run",
            hint="install it into the node's environment: pip install 'fleetstart[transformers]'",
        ) from error
    handler: Any = getattr(module, task.handler)({name: settings[name] for name in task.settings if name in settings})
    return handler


def with_openai_routes(handler: Any, app: App, *, name: str) -> App:
    """The app of a handler with the routes of OpenAI's API for its task: `/v1/embeddings` for embeddings."""
    if not hasattr(handler, "embed"):
        return app
    from ..openai_api.embeddings import EmbeddingsApp

    return EmbeddingsApp(handler, app, name=name)
