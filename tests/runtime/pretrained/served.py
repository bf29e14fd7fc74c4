"""Handlers of `Transformers`, loaded in the test's own process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetstart.runtime.pretrained import create_handler
from tests.runtime.saved_models import segment_of_folder


class Served:
    """A loaded handler. Calling it makes one call; `together` makes several at once."""

    def __init__(self, folder: Path, task: str, **settings: Any) -> None:
        self.handler = create_handler({"weights": "./weights", "task": task, **settings})
        self.handler.load(segment_of_folder(folder).attach())
        if hasattr(self.handler, "warm"):
            self.handler.warm()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not inspect.iscoroutinefunction(type(self.handler).__call__):
            return self.handler(*arguments, **named)
        return asyncio.run(self.handler(*arguments, **named))

    def together(self, calls: Sequence[tuple[Any, ...]]) -> tuple[list[Any], int]:
        """Answers of concurrent calls, errors among them, and how many passes of the model they took."""
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        async def everything() -> list[Any]:
            return await asyncio.gather(*(self.handler(*one) for one in calls), return_exceptions=True)

        hook = self.model.register_forward_pre_hook(count)
        try:
            return asyncio.run(everything()), passes
        finally:
            hook.remove()

    @property
    def model(self) -> Any:
        pipeline = getattr(self.handler, "_pipeline", None)
        return self.handler._model if pipeline is None else pipeline.model
