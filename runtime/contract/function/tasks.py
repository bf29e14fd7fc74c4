"""Tasks of `Transformers(task=...)`: the class that serves each, and the settings that it takes.

The deploy reads inputs and answers of a task from that class's signature, as it reads a user's handler; the worker runs
the class.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidSpec

PACKAGE = Path(__file__).parents[2] / "pretrained"
"""The folder of the classes. Their files are read and parsed at deploy, and imported by workers only."""
POOLINGS = ("mean", "cls", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A class of `runtime/pretrained`, and the settings that only this task has."""

    module: str
    handler: str
    settings: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return PACKAGE / f"{self.module}.py"


TASKS = {
    "text-classification": Task(module="text", handler="TextClassification", settings=("max_tokens",)),
    "embedding": Task(module="text", handler="Embedding", settings=("max_tokens", "pooling", "normalize")),
    "reranking": Task(module="text", handler="Reranking", settings=("max_tokens",)),
    "automatic-speech-recognition": Task(module="media", handler="SpeechRecognition"),
    "image-classification": Task(module="media", handler="ImageClassification"),
}


def check_task(settings: dict[str, object]) -> Task:
    """The task of a declaration. Errors: InvalidSpec for an unknown task, or a setting that it does not have."""
    name = settings.get("task")
    if not isinstance(name, str) or name not in TASKS:
        near = difflib.get_close_matches(str(name), list(TASKS), n=1, cutoff=0.5)
        raise InvalidSpec(
            "Transformers() needs a task" if name is None else f"Transformers(task={name!r}): there is no such task",
            hint=f"did you mean {near[0]!r}?" if near else f"tasks are {', '.join(TASKS)}",
        )
    task = TASKS[name]
    for setting in ("max_tokens", "pooling", "normalize"):
        if setting in settings and setting not in task.settings:
            raise InvalidSpec(
                f"Transformers(task={name!r}) has no setting {setting!r}",
                hint=f"its own are {', '.join(task.settings)}" if task.settings else "it has none of its own",
            )
    tokens = settings.get("max_tokens", 1)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InvalidSpec(f"Transformers(max_tokens={tokens!r}): it is a number of tokens, at least 1")
    if settings.get("pooling", "mean") not in POOLINGS:
        raise InvalidSpec(
            f"Transformers(pooling={settings['pooling']!r}): there is no such pooling", hint=f"one of {POOLINGS}"
        )
    if not isinstance(settings.get("normalize", True), bool):
        raise InvalidSpec(f"Transformers(normalize={settings['normalize']!r}): True or False")
    return task
