"""Tasks of `Transformers(task=...)`: the class that serves each, and the settings that it takes.

The deploy reads inputs and answers of a task from that class's signature, as it reads a user's handler; the worker runs
the class.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointInvalid, InvalidSpec

PACKAGE = Path(__file__).parents[2] / "pretrained"
"""The folder of the classes. Their files are read and parsed at deploy, and imported by workers only."""
POOLINGS = ("mean", "cls", "last")
SHARED_CALLS = 16
"""Concurrency of tasks whose calls are computed together: half a pass of single inputs, so that a call waits for one
pass and is in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A class of `runtime/pretrained`, the settings that only this task has, and the models that it runs."""

    module: str
    handler: str
    settings: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    """Parts of names of transformers' classes, of which the model's architecture has one. Empty: any."""
    reader: str = "tokenizer"
    """What reads its inputs: a file of one of `READERS` must be beside the weights."""
    concurrency: int = 1
    """Calls that one worker serves at a time unless the declaration says so: more where they share a pass."""

    @property
    def path(self) -> Path:
        return PACKAGE / f"{self.module}.py"


READERS = {
    "tokenizer": ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model",
                  "sentencepiece.bpe.model"),
    "processor": ("preprocessor_config.json", "processor_config.json"),
}  # fmt: skip
"""Files that transformers makes a tokenizer or a processor of sound and pictures from."""
TASKS = {
    "text-classification": Task(
        module="text",
        handler="TextClassification",
        settings=("max_tokens",),
        architectures=("ForSequenceClassification",),
        concurrency=SHARED_CALLS,
    ),
    "embedding": Task(
        module="text",
        handler="Embedding",
        settings=("max_tokens", "pooling", "normalize"),
        concurrency=SHARED_CALLS,
    ),
    "reranking": Task(
        module="text",
        handler="Reranking",
        settings=("max_tokens",),
        architectures=("ForSequenceClassification",),
        concurrency=SHARED_CALLS,
    ),
    "automatic-speech-recognition": Task(
        module="speech",
        handler="SpeechRecognition",
        architectures=("ForCTC", "ForConditionalGeneration", "ForSpeechSeq2Seq"),
        reader="processor",
    ),
    "image-classification": Task(
        module="vision",
        handler="ImageClassification",
        architectures=("ForImageClassification",),
        reader="processor",
        concurrency=SHARED_CALLS,
    ),
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


def check_checkpoint(name: str, config: object, files: Collection[str]) -> None:
    """Checks that a checkpoint is of a model of this task.

    Args:
        name: The task.
        config: The checkpoint's config.json, decoded.
        files: Names of its small files.

    Errors: CheckpointInvalid, naming the architecture or the file that is not there.
    """
    task = TASKS[name]
    found = config.get("architectures") if isinstance(config, dict) else None
    saved = [str(one) for one in found] if isinstance(found, list) else []
    if task.architectures and saved and not any(part in one for part in task.architectures for one in saved):
        fits = [
            other for other, its in TASKS.items() if any(part in one for part in its.architectures for one in saved)
        ]
        raise CheckpointInvalid(
            f"config.json: the model was saved as {', '.join(saved)}, and {name} needs a model "
            f"{' or '.join(f'...{part}' for part in task.architectures)}",
            hint=f"choose task={fits[0]!r}"
            if fits
            else "choose a model that was trained for the task, or another task",
        )
    if not any(file in files for file in READERS[task.reader]):
        raise CheckpointInvalid(
            f"the weights have no {task.reader}: none of {', '.join(READERS[task.reader])}",
            hint=f"save it beside them: {task.reader}.save_pretrained(FOLDER)",
        )
