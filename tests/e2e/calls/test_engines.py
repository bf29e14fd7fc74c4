"""A model that the native engine refuses, served over transformers: deployed, called, streamed, billed, explained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from tests.e2e.systems import System
from tests.runner.late import late
from tests.servers import wait_until

torch, transformers, safetensors = late("torch"), late("transformers"), late("safetensors.torch")

REAL = Path(__file__).parents[3] / "examples" / "chat" / "weights"
NEW = 12
PROMPT = "Once upon a time"
HANDLER = """
from fleetstart.runtime import LLM

neox = LLM(weights="./weights", {settings}memory="2GiB", max_context=256, kv_memory="16MiB")
"""
CONFIG: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True, slots=True)
class Model:
    """A folder with a random GPT-NeoX and the real model's tokenizer; what plain transformers makes of the prompt."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Model:
    if not (REAL / "tokenizer.json").exists():
        if os.environ.get("CI"):
            pytest.fail("examples/chat/weights is not there: `make models` makes it")
        pytest.skip("examples/chat/weights is not there: `make models` makes it")
    weights = tmp_path_factory.mktemp("neox") / "weights"
    torch.manual_seed(1)
    config = transformers.GPTNeoXConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(weights)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(REAL / name, weights / name)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(weights / "tokenizer.json"))
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    said = model.generate(tokens, max_new_tokens=NEW, do_sample=False, pad_token_id=2)
    return Model(weights.parent, str(tokenizer.decode(said[0, tokens.shape[1] :], skip_special_tokens=True)))


@pytest.fixture(scope="module")
def neox(system: System, made: Model) -> Iterator[System]:
    folder = made.folder
    (folder / "handler.py").write_text(HANDLER.format(settings=""))
    ran = system.fs("deploy", str(folder / "handler.py"), "--keep-alive", "600", "--no-probe")
    assert "engine transformers (the native engine refuses it: config.json: model_type 'gpt_neox'" in ran.err
    yield system
    system.fs("rm", "neox", "--yes")


def test_it_is_called_streamed_and_billed_like_any_other(neox: System, made: Model) -> None:
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    first = neox.call("neox", body, path="/v1/completions", timeout_s=120)
    assert first.status_code == 200, first.text
    assert first.headers["fs-start"] == "cold"
    assert first.json()["choices"][0]["text"] == made.said
    with openai.OpenAI(base_url=f"{neox.url}/fn/neox/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.completions.create(model="neox", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == made.said
    rows = wait_until(lambda: [row for row in neox.invocations() if row.function == "neox"][1:], what="two bills")
    assert all(row.status == 200 and row.billed_ms > 0 and row.cost_nusd > 0 for row in rows)


def test_its_engine_is_shown(neox: System) -> None:
    [shown] = [one for one in msgspec.json.decode(neox.fs("ls", "--json").out) if one["name"] == "neox"]
    assert shown["spec"]["llm"]["engine"] == "transformers"
    assert "engine transformers" in neox.fs("explain", "neox").out


TWO = """
from fleetstart.runtime import LLM

pair = LLM(weights="./weights", engine="{engine}", first="native", memory="2GiB", max_context=256, kv_memory="16MiB")
"""


def test_the_native_engine_answers_until_the_other_one_is_up(system: System, made: Model, tmp_path: Path) -> None:
    """One worker, one bill a call, the same text before and after; both engines are shown. `made` skips it where there
    is no tokenizer."""
    folder = llama(tmp_path)
    (folder / "pair.py").write_text(TWO.format(engine="transformers"))
    ran = system.fs("deploy", str(folder / "pair.py"), "--keep-alive", "600", "--no-probe")
    assert "engine transformers (as declared; the native engine answers until it is up)" in ran.err
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}

    def said() -> str:
        answer = system.call("pair", body, path="/v1/completions", timeout_s=120)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def is_up() -> bool:
        texts.add(said())
        return "and came up in" in system.fs("explain", "pair").out

    texts = {said()}
    wait_until(is_up, 120, what="the second engine")
    assert len(texts) == 1
    shown = system.fs("explain", "pair").out
    assert "engine transformers" in shown
    assert "transformers began" in shown
    rows = [row for row in system.invocations() if row.function == "pair"]
    assert len({row.worker for row in rows}) == 1
    assert "came up in" in system.fs("trace", "pair").out
    system.fs("rm", "pair", "--yes")


ADAPTED = """
from fleetstart.runtime import LLM

tuned = LLM(weights="./weights", adapters={"sql": "./sql"}, memory="2GiB", max_context=256, kv_memory="16MiB")
"""


def test_a_request_chooses_an_adapter_by_its_model(system: System, made: Model, tmp_path: Path) -> None:
    """From a folder of PEFT's to another answer of the same worker; both calls are billed alike."""
    folder = llama(tmp_path)
    module, width = "base_model.model.model.layers.0.self_attn.q_proj", LLAMA["hidden_size"]
    (folder / "sql").mkdir()
    tensors = {f"{module}.lora_A.weight": torch.randn(2, width), f"{module}.lora_B.weight": torch.randn(width, 2)}
    safetensors.save_file(tensors, folder / "sql" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "sql" / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "tuned.py").write_text(ADAPTED)
    assert "; adapter sql " in system.fs("deploy", str(folder / "tuned.py"), "--keep-alive", "600", "--no-probe").err
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answers = {}
    for model in ("tuned", "sql"):
        answer = system.call("tuned", body | {"model": model}, path="/v1/completions", timeout_s=120)
        assert answer.status_code == 200, answer.text
        answers[model] = answer.json()
    assert [one["model"] for one in answers.values()] == ["tuned", "sql"]
    assert answers["tuned"]["choices"][0]["text"] != answers["sql"]["choices"][0]["text"]
    refused = system.call("tuned", body | {"model": "gpt"}, path="/v1/completions", timeout_s=120)
    assert (refused.status_code, refused.json()["error"]["hint"]) == (404, "ask for 'tuned' or 'sql'")
    wait_until(lambda: len(bills(system, "tuned")) == 3, what="the bills")
    rows = bills(system, "tuned")
    assert sorted(row.status for row in rows) == [200, 200, 404]
    assert all(row.cost_nusd > 0 for row in rows if row.status == 200)
    assert len({row.worker for row in rows}) == 1
    system.fs("rm", "tuned", "--yes")


def bills(system: System, function: str) -> list[InvocationRow]:
    return [row for row in system.invocations() if row.function == function]


def test_two_engines_need_a_model_that_the_native_one_runs(system: System, made: Model) -> None:
    (made.folder / "pair.py").write_text(TWO.format(engine="transformers"))
    error = system.refused(made.folder / "pair.py")
    assert "the native engine cannot answer first: " in error.message
    assert "model_type 'gpt_neox' is not supported" in error.message


def llama(folder: Path) -> Path:
    """A folder with a random Llama of two layers and the real model's tokenizer."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder / "weights")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(REAL / name, folder / "weights" / name)
    return folder


def test_an_engine_that_is_named_and_cannot_run_it_is_refused(neox: System, made: Model) -> None:
    folder = made.folder
    (folder / "named.py").write_text(HANDLER.format(settings='engine="native", '))
    error = neox.refused(folder / "named.py")
    assert "model_type 'gpt_neox' is not supported" in error.message
    config = json.loads((folder / "weights" / "config.json").read_text())
    recurrent = folder / "recurrent"
    shutil.copytree(folder, recurrent, ignore=shutil.ignore_patterns("recurrent"))
    (recurrent / "weights" / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "'mamba' keeps a recurrent state" in neox.refused(recurrent / "handler.py").message


def test_an_idle_model_stands_by_and_a_call_wakes_it(neox: System, made: Model) -> None:
    handler = made.folder / "resting.py"
    handler.write_text(HANDLER.format(settings="").replace("neox =", "resting ="))
    neox.fs("deploy", str(handler), "--keep-alive", "0.3", "--standby", "600", "--no-probe")
    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    try:
        started = neox.call("resting", body, path="/v1/completions", timeout_s=120)
        assert started.status_code == 200, started.text
        for _ in range(2):
            worker = wait_until(lambda: _resting(neox), 30, what="standby")
            assert worker is not None
            assert 0 < worker["memory_bytes"] < 2 << 30
            woken = neox.call("resting", body, path="/v1/completions", timeout_s=120)
            assert (woken.status_code, woken.headers["fs-start"]) == (200, "standby"), woken.text
            assert woken.json()["choices"][0]["text"] == made.said
        assert "load" in woken.headers["server-timing"]
        wait_until(lambda: "woken from standby" in neox.fs("explain", "resting").out, what="the explanation")
        usage = wait_until(lambda: _standby_usage(neox), what="the ledger's rows")
        assert usage is not None
        assert usage["cost_nusd"] == 0
    finally:
        neox.fs("rm", "resting", "--yes")


def _resting(system: System) -> dict[str, Any] | None:
    """Its only worker, if that stands by."""
    [shown] = [one for one in msgspec.json.decode(system.fs("ls", "--json").out) if one["name"] == "resting"]
    states = {one["state"] for one in shown["workers"]}
    [*workers] = shown["workers"]
    return workers[0] if states == {"standby"} and len(workers) == 1 and workers[0]["memory_bytes"] else None


def _standby_usage(system: System) -> dict[str, Any] | None:
    lines = msgspec.json.decode(system.fs("usage", "--by", "function,phase", "--json").out)
    rows = lines["lines"] if isinstance(lines, dict) else lines
    return next((row for row in rows if row["function"] == "resting" and row["kind"] == "standby"), None)
