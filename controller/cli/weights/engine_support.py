"""Whether the engine of language models can run a checkpoint, from its config.json, before anything is uploaded."""

from __future__ import annotations

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.llama_config import LlamaConfig, read_config

from .local_files import read_all
from .source import Source

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
CONFIG_MAX_BYTES = MIB


def require_runnable(source: Source, where: str) -> LlamaConfig:
    """Reads the configuration of a model that an `LLM` declares. `where` names the declaration.

    Errors: CheckpointInvalid, naming the field that the engine does not support, or the file that is not there.
    """
    files = {one.name: one for one in source.files}
    for name in (CONFIG, TOKENIZER):
        if name not in files:
            raise CheckpointInvalid(
                f"{where}: the weights of this LLM have no {name}", hint=f"put {name} beside the safetensors"
            )
    config = files[CONFIG]
    if config.size_bytes > CONFIG_MAX_BYTES:
        raise CheckpointInvalid(f"{config.file} has {config.size_bytes} bytes, {CONFIG_MAX_BYTES} at most")
    try:
        return read_config(read_all(config.file))
    except CheckpointInvalid as error:
        raise CheckpointInvalid(
            f"{where}: this LLM cannot run: {error.message}", hint=error.hint or f"in {config.file}"
        ) from error
