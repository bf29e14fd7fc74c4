"""Table of model families × engines × devices × dtypes in docs/models.md; each cell names the test that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetstart.runtime.contract.weights.model_families import FAMILIES

NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One engine on one device with one dtype. `shown` is what a cell claims, `test` the function in `file` that shows
    it."""

    title: str
    shown: str
    test: str = ""
    file: str = "model/test_families.py"
    """Below tests/runtime/llm."""


COLUMNS = (
    Column(title="native, CPU, fp32", shown="equal", test="test_tokens_are_those_of_transformers"),
    Column(
        title="native, CPU, bf16 and fp16",
        shown="close",
        test="test_narrow_weights_and_caches_stay_close_to_transformers",
    ),
    Column(
        title="native, CPU, two stages",
        shown="equal",
        test="test_tokens_through_two_stages_are_those_of_the_whole_model",
    ),
    Column(
        title="native, two CPU devices, fp32",
        shown="equal",
        test="test_tokens_are_those_of_one_device",
        file="tensor_parallel/test_split_model.py",
    ),
    Column(title="native, CUDA, fp32", shown="equal", test="test_tokens_on_cuda_are_those_of_transformers"),
    Column(
        title="transformers, CPU and CUDA, fp32",
        shown="equal",
        test="test_the_transformers_engine_gives_the_same_tokens",
    ),
    Column(title="transformers, bf16 and fp16", shown=NOT_RUN),
    Column(title="vllm, CPU, fp32", shown="equal", test="test_the_vllm_engine_gives_the_same_tokens"),
    Column(title="vllm, CPU, bf16 and fp16; CUDA", shown=NOT_RUN),
)
CASES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "phi3": "phi3",
    "granite": "granite",
}  # fmt: skip
"""The case of the tests by `model_type`."""


def markdown_table() -> str:
    head = ["family", "`model_type`", *(column.title for column in COLUMNS)]
    rows = [
        [family.name, f"`{model_type}`", *(column.shown for column in COLUMNS)]
        for model_type, family in FAMILIES.items()
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)
