"""The token table gives the tokens and the texts that the library gives, or is not made at all."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.token_table import build_table
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.weights import token_table
from fleetstart.runtime.contract.weights.manifest import read_manifest
from fleetstart.runtime.contract.weights.token_table import HEAD
from fleetstart.runtime.llm.text import table_tokenizer
from fleetstart.runtime.llm.text.table_tokenizer import TableTokenizer
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.controller.cli.checkpoints import MemoryStore, model, no_progress, write_model

ROOT = Path(__file__).parents[4]
CHAT = ROOT / "examples/chat/weights/tokenizer.json"
SPECIAL = ["<|end|>", "<|start|>", "<s>"]
CORPUS = [(ROOT / name).read_text() for name in ("README.md", "LICENSE", "runtime/handlers/app.py")] + [
    "naïve été 你好 😀 \t\n"
]


def trained(**changes: Any) -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer, as checkpoints have them."""
    tokenizer = tokenizers.Tokenizer(models.BPE(**changes))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def pair(kind: str) -> tuple[TableTokenizer, Tokenizer]:
    if kind == "chat":
        data = CHAT.read_bytes()
    else:
        tokenizer = trained()
        if kind == "with a beginning":
            end = tokenizer.token_to_id("<|end|>")
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=[
                ("<s>", tokenizer.token_to_id("<s>")), ("<|end|>", end)])  # fmt: skip
        data = tokenizer.to_str().encode()
    table = build_table(data)
    assert table is not None
    library = Tokenizer(data)
    return TableTokenizer(memoryview(table), lambda: library), library


KINDS = [
    "trained",
    "with a beginning",
    pytest.param("chat", marks=pytest.mark.skipif(not CHAT.exists(), reason=str(CHAT))),
]
TEXTS = st.text() | st.lists(
    st.sampled_from([*SPECIAL, "<|im_start|>", "<|im_end|>", "the", " the", "  ", "\n\n", "é", "你好", "😀", "'s"])
    | st.text(max_size=5)
).map("".join)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, special=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_gets_the_librarys_tokens(kind: str, text: str, special: bool) -> None:
    table, library = pair(kind)
    assert table.encode(text, add_special_tokens=special) == library.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(), count=st.integers(0, 20), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_tokens_get_the_librarys_text(kind: str, seed: int, count: int, skip: bool) -> None:
    """Ids that no token has included: a model's embedding may be larger than its vocabulary."""
    table, library = pair(kind)
    ids = random.Random(seed).choices(range(library.vocab_size + 10), k=count)
    assert table.decode(ids, skip_special=skip) == library.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_and_endless_words(kind: str) -> None:
    table, library = pair(kind)
    assert table.vocab_size == library.vocab_size
    for text in [*CORPUS, "a" * 3000, "ab " * 2000]:
        assert table.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False)


def test_texts_beyond_its_limit_go_to_the_library() -> None:
    library = pair("trained")[1]
    data = trained().to_str().encode()
    asked: list[int] = []

    def ask() -> Tokenizer:
        asked.append(1)
        return library

    table = TableTokenizer(memoryview(build_table(data) or b""), ask)
    text = "words " * (table_tokenizer.TEXT_MAX // 6 + 1)
    assert table.encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False)
    table.encode("words", add_special_tokens=False)
    assert asked == [1]


def _normalising(whole: dict[str, Any]) -> None:
    whole["normalizer"] = {"type": "NFC"}


def _prefixing(whole: dict[str, Any]) -> None:
    whole["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def _replacing(whole: dict[str, Any]) -> None:
    whole["pre_tokenizer"]["pretokenizers"][0] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}


def _by_words(whole: dict[str, Any]) -> None:
    whole["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


def _looking_up(whole: dict[str, Any]) -> None:
    whole["model"]["ignore_merges"] = True


def _twice(whole: dict[str, Any]) -> None:
    whole["model"]["merges"].append(whole["model"]["merges"][0])


def _impossible(whole: dict[str, Any]) -> None:
    whole["model"]["merges"].append(["no such", "token"])


def _foreign(whole: dict[str, Any]) -> None:
    whole["post_processor"] = {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}


@pytest.mark.parametrize(
    "change", [_normalising, _prefixing, _replacing, _by_words, _looking_up, _twice, _impossible, _foreign]
)
def test_what_a_table_cannot_stand_for_gets_none(change: Callable[[dict[str, Any]], None]) -> None:
    whole = json.loads(trained().to_str())
    change(whole)
    assert build_table(json.dumps(whole).encode()) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"model":1}', b"[" * 10_000])
def test_what_is_no_tokenizer_gets_none(data: bytes) -> None:
    assert build_table(data) is None


def test_equal_tokenizers_give_equal_tables() -> None:
    data = trained().to_str().encode()
    assert build_table(data) == build_table(json.dumps(json.loads(data), indent=1).encode())


def test_it_travels_with_the_weights(tmp_path: Path) -> None:
    data = trained().to_str()
    weights = write_model(tmp_path / "weights", model(), files={"tokenizer.json": data})
    store = MemoryStore()
    published = publish(weights, store, cache=tmp_path / "cache", progress=no_progress)
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    entry, part = manifest.files[token_table.FILE], manifest.parts[0]
    begin = part.header_bytes + entry.offset
    whole = store.objects[f"checkpoints/{published.id}/{part.object}"]
    assert whole[begin : begin + entry.size_bytes] == build_table(data.encode())
    assert publish(weights, store, cache=tmp_path / "cache", progress=no_progress).uploaded_bytes == 0


def test_merges_written_as_texts_are_the_same() -> None:
    whole = json.loads(trained().to_str())
    before = build_table(json.dumps(whole).encode())
    whole["model"]["merges"] = [" ".join(merge) for merge in whole["model"]["merges"]]
    assert build_table(json.dumps(whole).encode()) == before


@pytest.mark.parametrize("cut", [0, 5, HEAD.size, HEAD.size + 100, -1])
def test_a_table_that_is_cut_is_refused(cut: int) -> None:
    table = build_table(trained().to_str().encode())
    assert table is not None
    with pytest.raises(CheckpointInvalid):
        TableTokenizer(memoryview(table[:cut]), lambda: pair("trained")[1])


def test_a_table_of_another_version_is_refused() -> None:
    table = bytearray(build_table(trained().to_str().encode()) or b"")
    table[:8] = b"FSTOKEN9"
    with pytest.raises(CheckpointInvalid, match="not one that this version reads"):
        TableTokenizer(memoryview(table), lambda: pair("trained")[1])
