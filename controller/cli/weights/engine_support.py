"""Checks whether a checkpoint can be run as it is declared, from its config.json, before anything is uploaded.

By an engine of language models, which is chosen here, or as a task of `Transformers`.
"""

from __future__ import annotations

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.function.tasks import check_checkpoint
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.engine_choice import EngineChoice, EngineSetting, choose_engine

from .local_files import read_all
from .source import SmallFile, Source

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG_MAX_BYTES = MIB


def require_runnable(
    source: Source,
    where: str,
    engine: EngineSetting = "auto",
    first: object = "",
    tensor_parallel_size: int = 1,
) -> EngineChoice:
    """Chooses the engine of a model that an `LLM` declares, behind the `first` one. `where` names the declaration.

    Errors: CheckpointInvalid, naming the field that the engine does not support, or the file that is not there;
    InvalidSpec for a `first` or a size that fits no engine.
    """
    config = _config(source, f"{where}: the weights of this LLM", (CONFIG, TOKENIZER))
    try:
        return choose_engine(engine, read_all(config.file), first, tensor_parallel_size)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(
            f"{where}: this LLM cannot run: {error.message}", hint=error.hint or f"in {config.file}"
        ) from error


def require_task(source: Source, task: str, where: str) -> None:
    """Checks that the weights of a `Transformers` are a model of its task.

    Errors: CheckpointInvalid, naming the architecture, or the file that is not there.
    """
    config = _config(source, f"{where}: the weights of this Transformers", (CONFIG,))
    try:
        check_checkpoint(task, msgspec.json.decode(read_all(config.file)), [one.name for one in source.files])
    except UNDECODABLE as error:
        raise CheckpointInvalid(f"{where}: {config.file} is no JSON: {error}") from error
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"{where}: {error.message}", hint=error.hint) from error


def has_chat_template(source: Source) -> bool:
    """Checks whether a language model's files have a template of chats, or may have one: a model without serves plain
    prompts alone."""
    files = {one.name: one for one in source.files}
    if CHAT_TEMPLATE in files:
        return True
    settings = files.get(TOKENIZER_CONFIG)
    return settings is not None and (
        settings.size_bytes > CONFIG_MAX_BYTES or b'"chat_template"' in read_all(settings.file)
    )


def _config(source: Source, what: str, names: tuple[str, ...]) -> SmallFile:
    """The config of a model that must have all these files. Errors: CheckpointInvalid."""
    files = {one.name: one for one in source.files}
    for name in names:
        if name not in files:
            raise CheckpointInvalid(f"{what} have no {name}", hint=f"put {name} beside the safetensors")
    config = files[CONFIG]
    if config.size_bytes > CONFIG_MAX_BYTES:
        raise CheckpointInvalid(f"{config.file} has {config.size_bytes} bytes, {CONFIG_MAX_BYTES} at most")
    return config
