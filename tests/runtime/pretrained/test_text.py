"""`Transformers` on text: what transformers itself computes from the same folder, to 1e-6."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.pretrained import create_handler
from tests.runner.late import late
from tests.runtime.pretrained.models import TEXT_FAMILIES, save_family, save_text_model
from tests.runtime.pretrained.served import Served
from tests.runtime.saved_models import segment_of, segment_of_folder
from tests.runtime.workers import Functions

transformers = late("transformers")

TEXTS = ["a good film .", "the cat sat on the mat .", "bad", "a bad cat sat on a good mat . " * 9]
EMBED = Path(__file__).parents[3] / "examples" / "embed" / "weights"
NEAR: dict[str, Any] = {"rel": 0, "abs": 1e-6}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `folder()` writes."""
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))


served = Served


def test_a_classifier_answers_as_the_pipeline_does(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    plain = transformers.pipeline("text-classification", str(folder), top_k=None, truncation=True)(TEXTS)
    found = served(folder, "text-classification")(TEXTS)
    assert [[one["label"] for one in labels] for labels in found] == [
        [one["label"] for one in labels] for labels in plain
    ]
    for labels, expected in zip(found, plain, strict=True):
        assert [one["score"] for one in labels] == pytest.approx([one["score"] for one in expected], **NEAR)
    assert len({labels[0]["score"] for labels in found}) == len(TEXTS)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_classifiers_and_embeddings_of_every_family_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    classifier = save_family(tmp_path / "classifier", family, "AutoModelForSequenceClassification")
    plain = transformers.pipeline("text-classification", str(classifier), top_k=None, truncation=True)(TEXTS)
    found = served(classifier, "text-classification")(TEXTS)
    for labels, expected in zip(found, plain, strict=True):
        assert [one["label"] for one in labels] == [one["label"] for one in expected]
        assert [one["score"] for one in labels] == pytest.approx([one["score"] for one in expected], **NEAR)
    folder = save_family(tmp_path / "embedder", family, "AutoModel")
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, vector in zip(TEXTS, served(folder, "embedding")(TEXTS)["embeddings"], strict=True):
        with torch.inference_mode():
            mean = model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0].mean(0)
        assert vector == pytest.approx((mean / mean.norm()).tolist(), **NEAR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_sixteen_bits_stays_in_them(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "bert", "AutoModelForSequenceClassification", dtype)
    handler = served(folder, "text-classification")
    plain = transformers.pipeline("text-classification", str(folder), top_k=None, dtype="auto")(TEXTS[:2])
    assert [labels for text in TEXTS[:2] for labels in handler(text)] == plain, "one by one, without padding"
    assert handler.model.dtype == dtype


def test_names_of_old_checkpoints_are_understood(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    expected = served(folder, "text-classification")(TEXTS)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    assert served(folder, "text-classification")(TEXTS) == expected


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertModel")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(CheckpointInvalid, match="'own'") as refused:
        served(folder, "embedding")
    assert "code" in refused.value.hint


def test_one_text_and_the_best_labels_only(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    handler = served(folder, "text-classification")
    assert handler(TEXTS[0], top_k=2) == [handler(TEXTS[:1])[0][:2]]
    assert handler([]) == []
    assert served(folder, "reranking")("a film", []) == {"results": []}


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_embedding_is_the_pooled_hidden_state(tmp_path: Path, pooling: str, normalize: bool) -> None:
    folder = save_text_model(tmp_path / "model", "BertModel")
    found = served(folder, "embedding", pooling=pooling, normalize=normalize)(TEXTS)["embeddings"]
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, vector in zip(TEXTS, found, strict=True):  # one by one, so that padding has no say
        with torch.inference_mode():
            hidden = model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state[0]
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        if normalize:
            expected = expected / expected.norm()
        assert vector == pytest.approx(expected.tolist(), **NEAR)


def test_a_rerankers_order_and_scores_are_the_models(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            expected.append(
                model(**tokenizer("a film", text, truncation=True, return_tensors="pt")).logits.sigmoid().item()
            )
    handler = served(folder, "reranking")
    results = handler("a film", TEXTS)["results"]
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    assert [one["index"] for one in results] == order
    assert [one["relevance_score"] for one in results] == pytest.approx([expected[index] for index in order], **NEAR)
    assert handler("a film", TEXTS, top_n=2)["results"] == results[:2]


def test_more_texts_than_one_pass_takes_keep_their_order(tmp_path: Path) -> None:
    handler = served(save_text_model(tmp_path / "model", "BertModel"), "embedding")
    many = handler(TEXTS * 20)["embeddings"]
    alone = handler(TEXTS)["embeddings"]
    assert all(many[index] == pytest.approx(alone[index % len(TEXTS)], **NEAR) for index in range(len(many)))
    assert handler([]) == {"embeddings": []}


@pytest.mark.parametrize("task", ["text-classification", "embedding", "reranking"])
def test_calls_at_a_time_share_passes_and_have_the_numbers_of_single_ones(task: str, tmp_path: Path) -> None:
    kind = "BertModel" if task == "embedding" else "BertForSequenceClassification"
    labels = {} if task == "embedding" else {"num_labels": 1 if task == "reranking" else 3}
    handler = served(save_text_model(tmp_path / "model", kind, **labels), task)
    calls: list[tuple[Any, ...]] = [
        ("a film", [text]) if task == "reranking" else (text,) for text in (*TEXTS, "cat", "the mat") * 2
    ]
    alone = [handler(*one) for one in calls]
    found, passes = handler.together(calls)
    assert passes == 2, "the first call computes at once, the others together"
    for answer, expected in zip(found, alone, strict=True):
        assert numbers_in(answer) == pytest.approx(numbers_in(expected), **NEAR)


def numbers_in(answer: Any) -> list[float]:
    """All numbers of an answer, in order."""
    if isinstance(answer, dict):
        return [number for value in answer.values() for number in numbers_in(value)]
    if isinstance(answer, list):
        return [number for value in answer for number in numbers_in(value)]
    return [float(answer)] if isinstance(answer, int | float) else []


def test_a_model_whose_tokenizer_cannot_pad_computes_one_by_one(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", "gpt2", "AutoModel")
    expected = served(folder, "embedding")(TEXTS)["embeddings"]
    handler = served(folder, "embedding")
    handler.handler._tokenizer.pad_token = None
    found, passes = handler.together([(text,) for text in TEXTS])
    assert passes == len(TEXTS)
    for answer, vector in zip(found, expected, strict=True):
        assert answer["embeddings"] == [pytest.approx(vector, **NEAR)]


def test_no_tensor_is_copied(tmp_path: Path) -> None:
    weights = segment_of_folder(save_text_model(tmp_path / "model", "BertModel")).attach()
    handler = create_handler({"weights": "./weights", "task": "embedding"})
    handler.load(weights)
    places = {tensor.data_ptr() for tensor in weights.values()}
    assert {parameter.data_ptr() for parameter in handler._model.parameters()} == places


def test_a_model_of_another_task_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForMaskedLM")
    with pytest.raises(
        CheckpointInvalid, match=r"does not fill BertForSequenceClassification; it lacks .*classifier"
    ) as no:
        served(folder, "text-classification")
    assert "saved from BertForMaskedLM" in no.value.hint
    assert len(served(folder, "embedding")("a cat")["embeddings"][0]) == 32


def test_weights_without_their_config_are_refused() -> None:
    handler = create_handler({"weights": "./weights", "task": "embedding"})
    with pytest.raises(CheckpointInvalid, match=r"no config\.json"):
        handler.load(segment_of({"a": torch.zeros(1)}).attach())


@pytest.mark.slow
def test_the_embed_example_has_transformers_vectors() -> None:
    if not (EMBED / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    texts = ["a cat on a mat", "the derivative of a sine", "two cats"]
    found = torch.tensor(served(EMBED, "embedding", max_tokens=256)(texts)["embeddings"])
    model = transformers.AutoModel.from_pretrained(EMBED)
    tokens = transformers.AutoTokenizer.from_pretrained(EMBED)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    assert (found - torch.nn.functional.normalize(mean, dim=1)).abs().max() <= 1e-6


def test_a_worker_serves_a_declaration(tmp_path: Path, torch_functions: Functions) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    segment = segment_of_folder(folder)
    worker = torch_functions.assigned(
        """
        from fleetstart.runtime import Transformers
        f = Transformers(weights="./weights", task="text-classification")
        """,
        profile="torch",
        weights=CheckpointId("0" * 64),
        segment=segment.fds,
    )
    worker.ready()
    plain = transformers.pipeline("text-classification", str(folder), top_k=None)(TEXTS[:2])
    found = worker.post({"texts": TEXTS[:2]}).json()
    scores = [one["score"] for labels in found for one in labels]
    assert scores == pytest.approx([one["score"] for labels in plain for one in labels], **NEAR)
    refused = worker.post({"texts": "a", "top_k": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["field"] == "top_k"
