"""Builds the token table of a tokenizer.json (layout: `runtime.contract.weights.token_table`).

A table can represent byte-level BPE over text as it is, exactly. Any other tokenizer, and one that cannot be read, has
no table: the worker then parses tokenizer.json.
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate
from typing import Any

import msgspec

from fleetstart.runtime.contract.weights.token_table import (
    EMPTY,
    HEAD,
    MAGIC,
    PIECE,
    AddedToken,
    RestOfTokenizer,
    first_slot,
)

SPLITTERS = frozenset(("Digits", "Split"))
"""Pre-tokenizers allowed before ByteLevel: they split text and do not change it."""
TOKENS_MAX = 1 << 22


def build_table(tokenizer_json: bytes) -> bytes | None:
    """Bytes of the table, equal for equal tokenizers; None if the tokenizer needs the library."""
    try:
        whole = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
        if not _is_plain(whole):
            return None
        return _table(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return None


def _is_plain(whole: dict[str, Any]) -> bool:
    model = whole["model"]
    return (
        whole.get("normalizer") is None
        and whole.get("truncation") is None
        and whole.get("padding") is None
        and _cuts_only(whole["pre_tokenizer"])
        and whole["decoder"]["type"] == "ByteLevel"
        and _adds_known(whole.get("post_processor"), whole.get("added_tokens") or [])
        and model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and not any(model.get(name) for name in ("byte_fallback", "ignore_merges", "fuse_unk"))
    )


def _cuts_only(pre_tokenizer: dict[str, Any]) -> bool:
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *before, last = steps
    return (
        last["type"] == "ByteLevel"
        and not last.get("add_prefix_space")
        and all(step["type"] in SPLITTERS for step in before)
    )


def _adds_known(post_processor: dict[str, Any] | None, added: list[dict[str, Any]]) -> bool:
    """Checks whether what it puts around a text are added tokens, which keep their ids."""
    if post_processor is None:
        return True
    if post_processor["type"] != "TemplateProcessing":
        return False
    ids = {token["content"]: token["id"] for token in added}
    return all(
        len(token["ids"]) == len(token["tokens"])
        and all(ids.get(content) == id for content, id in zip(token["tokens"], token["ids"], strict=True))
        for token in post_processor["special_tokens"].values()
    )


def _table(whole: dict[str, Any]) -> bytes:
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    merges = [_pair(merge) for merge in whole["model"]["merges"]]
    added = whole.get("added_tokens") or []
    count = max([*vocabulary.values(), *(token["id"] for token in added)]) + 1
    texts = [""] * count
    for token in added:
        texts[token["id"]] = token["content"]
    for text, id in vocabulary.items():
        if id < 0 or not text or count > TOKENS_MAX:
            raise ValueError(f"token {text!r} has id {id}")
        texts[id] = text
    unknown = whole["model"].get("unk_token")
    missing = EMPTY if unknown is None else vocabulary[unknown]
    symbols = array("I", (vocabulary.get(letter, missing) for letter in byte_letters()))
    slots = _merge_slots(merges, vocabulary)
    offsets, joined = _joined(texts)
    rest = msgspec.json.encode(_rest(whole, added), order="deterministic")
    head = HEAD.pack(MAGIC, count, len(slots) // 4, len(joined), len(rest), 0)
    return b"".join((head, _little(symbols), _little(offsets), _little(slots), joined, rest))


def _pair(merge: Any) -> tuple[str, str]:
    """Older files write a merge as one text with a space between."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _merge_slots(merges: list[tuple[str, str]], vocabulary: dict[str, int]) -> array[int]:
    """At most half full, so that a search looks at two slots or so."""
    if len(set(merges)) != len(merges):
        raise ValueError("a merge stands twice")
    count = 1 << max(4, (2 * len(merges)).bit_length())
    mask = count - 1
    lefts, rights, ranks, merged = ([EMPTY] * count for _ in range(4))
    for rank, (left_text, right_text) in enumerate(merges):
        left, right = vocabulary[left_text], vocabulary[right_text]
        slot = first_slot(left, right, mask)
        while lefts[slot] != EMPTY:
            slot = (slot + 1) & mask
        lefts[slot], rights[slot], ranks[slot], merged[slot] = left, right, rank, vocabulary[left_text + right_text]
    slots = array("I", bytes(16 * count))
    for column, values in enumerate((lefts, rights, ranks, merged)):
        slots[column::4] = array("I", values)
    return slots


def _joined(texts: list[str]) -> tuple[array[int], bytes]:
    parts = [text.encode() for text in texts]
    return array("I", accumulate(map(len, parts), initial=0)), b"".join(parts)


def _rest(whole: dict[str, Any], added: list[dict[str, Any]]) -> RestOfTokenizer:
    """Added tokens are numbered anew, after PIECE: the library insists on ids without gaps."""
    numbered = [{**token, "id": number} for number, token in enumerate(added, start=1)]
    model = {"type": "WordLevel", "vocab": {PIECE: 0}, "unk_token": PIECE}
    tokenizer = {**whole, "model": model, "added_tokens": numbered}
    ids = {token["content"]: AddedToken(token["id"], bool(token.get("special"))) for token in added}
    if PIECE in ids or len(ids) != len(added):
        raise ValueError("an added token stands twice")
    return RestOfTokenizer(tokenizer=tokenizer, added=ids)


def byte_letters() -> list[str]:
    """Character that byte-level vocabularies use for each byte: printable ones themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: 0x100 + number for number, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def _little(values: array[int]) -> bytes:
    assert values.itemsize == 4
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
