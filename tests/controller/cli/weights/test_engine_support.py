"""LLMs that the engine cannot run, and models of another task, are refused by the deploy, and nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.output import FAILED
from fleetstart.controller.cli.root import run
from fleetstart.controller.cli.weights.engine_support import has_chat_template, require_runnable, require_task
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.function.tasks import TASKS
from tests.controller.cli.checkpoints import write_model
from tests.controller.conftest import ControllerProcess

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
}  # fmt: skip
OTHERS = [
    ({"model_type": "qwen2"}, "architectures names 'LlamaForCausalLM', only Qwen2ForCausalLM"),
    ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ({"model_type": "gemma2"}, "model_type 'gemma2'"),
    ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures names 'LlamaForSequenceClassification'"),
    ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "rope scaling 'mrope'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_size": None}, "hidden_size"),
]
HANDLER = 'from fleetstart.runtime import LLM\n\nchat = LLM(weights="./w")\n'


def model(folder: Path, **changes: Any) -> Path:
    write_model(folder, {"model.embed_tokens.weight": ("F32", (2, 2), bytes(16))})
    fields = {name: value for name, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_what_the_native_engine_runs_is_its(tmp_path: Path) -> None:
    source = read_source(model(tmp_path / "w"))
    assert require_runnable(source, "handler.py:3").engine == "native"
    assert require_runnable(source, "handler.py:3", "transformers").engine == "transformers"


def test_what_its_kernels_do_not_take_is_said_with_the_reason(tmp_path: Path) -> None:
    choice = require_runnable(read_source(model(tmp_path / "w", hidden_size=40)), "handler.py:3")
    assert choice.engine == "native"
    assert choice.reason.endswith("not with its own kernels: hidden_size 40 is no multiple of 16")


def test_what_it_does_not_run_is_for_transformers(tmp_path: Path) -> None:
    source = read_source(model(tmp_path / "w", model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"]))
    choice = require_runnable(source, "handler.py:3")
    assert choice.engine == "transformers"
    assert "native engine refuses it: config.json: model_type 'gpt_neox'" in choice.reason


@pytest.mark.parametrize(("changes", "named"), OTHERS)
def test_what_it_does_not_run_is_refused_with_the_place_and_the_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointInvalid) as refused:
        require_runnable(read_source(model(tmp_path / "w", **changes)), "handler.py:3", "native")
    assert refused.value.message.startswith("handler.py:3: this LLM cannot run: config.json: ")
    assert named in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_the_engine_needs_is_named(tmp_path: Path, name: str) -> None:
    (model(tmp_path / "w") / name).unlink()
    with pytest.raises(CheckpointInvalid, match=f"have no {name}"):
        require_runnable(read_source(tmp_path / "w"), "handler.py:3")


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_deploy_of_it_sends_nothing(
    tmp_path: Path, controller: ControllerProcess, capsys: pytest.CaptureFixture[str], dry: list[str]
) -> None:
    model(tmp_path / "w", model_type="mamba", architectures=["MambaForCausalLM"])
    (tmp_path / "handler.py").write_text(HANDLER)
    home = ["--home", str(tmp_path / "client")]
    assert run([*home, "deploy", str(tmp_path / "handler.py"), "--url", controller.url, *dry]) == FAILED
    shown = capsys.readouterr().err
    assert "handler.py:3: this LLM cannot run: config.json: 'mamba' keeps a recurrent state" in shown
    assert "for the native engine: config.json: model_type 'mamba' is not supported" in shown
    assert "handler of your own" in shown
    store = controller.home / "store"
    assert not [path for path in store.rglob("*") if path.is_file()]
    assert controller.http.get("/api/v1/functions").json() == []


TASK_MODELS = {
    "text-classification": ("BertForSequenceClassification", "vocab.txt"),
    "embedding": ("BertForMaskedLM", "tokenizer.json"),
    "reranking": ("XLMRobertaForSequenceClassification", "sentencepiece.bpe.model"),
    "automatic-speech-recognition": ("WhisperForConditionalGeneration", "preprocessor_config.json"),
    "image-classification": ("ViTForImageClassification", "preprocessor_config.json"),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_the_task_passes_and_lacks_nothing(tmp_path: Path, task: str) -> None:
    architecture, reader = TASK_MODELS[task]
    folder = model(tmp_path / "w", model_type="some", architectures=[architecture])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"handler\.py:3: the weights have no (tokenizer|processor)"):
        require_task(read_source(folder), task, "handler.py:3")
    (folder / reader).write_text("{}")
    require_task(read_source(folder), task, "handler.py:3")
    require_task(read_source(model(folder, architectures=None)), task, "handler.py:3")  # an old file may not name it
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"of this Transformers have no config\.json"):
        require_task(read_source(folder), task, "handler.py:3")


@pytest.mark.parametrize(
    ("task", "architecture", "hint"),
    [
        ("text-classification", "BertForMaskedLM", "trained for the task"),
        ("text-classification", "ViTForImageClassification", "task='image-classification'"),
        ("image-classification", "WhisperForConditionalGeneration", "task='automatic-speech-recognition'"),
    ],
)
def test_a_model_of_another_task_is_refused_with_the_task_that_fits(
    tmp_path: Path, task: str, architecture: str, hint: str
) -> None:
    folder = model(tmp_path / "w", architectures=[architecture])
    with pytest.raises(CheckpointInvalid, match=f"saved as {architecture}, and {task} needs") as refused:
        require_task(read_source(folder), task, "handler.py:3")
    assert hint in refused.value.hint


def test_a_deploy_of_another_tasks_model_sends_nothing(
    tmp_path: Path, controller: ControllerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path / "w", architectures=["BertForMaskedLM"])
    (tmp_path / "handler.py").write_text(
        HANDLER.replace("LLM(", 'Transformers(task="text-classification", ').replace(
            "import LLM", "import Transformers"
        )
    )
    home = ["--home", str(tmp_path / "client")]
    assert run([*home, "deploy", str(tmp_path / "handler.py"), "--url", controller.url]) == FAILED
    assert "handler.py:3: config.json: the model was saved as BertForMaskedLM" in capsys.readouterr().err
    assert not [path for path in (controller.home / "store").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("files", "chats"),
    [
        ({}, False),
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": '{"bos_token": "<s>"}'}, False),
    ],
    ids=["none", "a file", "in the settings", "settings without"],
)
def test_a_template_of_chats_is_found_where_checkpoints_have_it(
    tmp_path: Path, files: dict[str, str], chats: bool
) -> None:
    weights = model(tmp_path / "w")
    for name, text in files.items():
        (weights / name).write_text(text)
    assert has_chat_template(read_source(weights)) is chats
