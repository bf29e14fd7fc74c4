"""Tokenizer over a token table in shared memory: no parsing, ready in a millisecond.

The `tokenizers` library still finds added tokens and splits the text into pieces, which depends on Unicode. Merging a
piece's bytes into tokens is byte-pair encoding over the table's hash table (layout: `contract.weights.token_table`);
the merges are taken in the library's own order, so that the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import msgspec
import tokenizers

from ...contract.errors import CheckpointInvalid
from ...contract.weights.token_table import EMPTY, HEAD, MAGIC, PIECE, RestOfTokenizer, first_slot
from .tokenizer import Vocabulary

PIECES_KEPT = 20_000
"""Size of the cache of pieces' tokens: words repeat."""
PIECE_KEPT_MAX_BYTES = 64
TEXT_MAX = 1 << 16
"""Longest text in characters; longer ones use the library, which merges several times faster once it is parsed."""

Merge = tuple[int, int]
"""Rank of a merge, and its resulting token."""


class TableTokenizer:
    """Tokenizer over a token table, without a copy of it. Thread-safe under the GIL.

    `library` returns the equivalent library tokenizer, for long texts.
    """

    def __init__(self, table: memoryview, library: Callable[[], Vocabulary]) -> None:
        """Errors: CheckpointInvalid for an invalid table; ids in it are checked on use."""
        if len(table) < HEAD.size:
            raise CheckpointInvalid(f"the token table has {len(table)} bytes, its head alone {HEAD.size}")
        magic, count, slots, text_bytes, rest_bytes, _ = HEAD.unpack_from(table)
        ends = [HEAD.size]
        for size in (1024, 4 * (count + 1), 16 * slots, text_bytes, rest_bytes):
            ends.append(ends[-1] + size)
        if magic != MAGIC or ends[-1] != len(table) or slots & (slots - 1) or not slots:
            raise CheckpointInvalid("the token table is not one that this version reads", hint="deploy again")
        self._symbols = table[ends[0] : ends[1]].cast("I").tolist()
        self._offsets = table[ends[1] : ends[2]].cast("I")
        self._slots = table[ends[2] : ends[3]].cast("I")
        self._mask = slots - 1
        self._text = table[ends[3] : ends[4]]
        self._count = count
        try:
            rest = msgspec.json.decode(table[ends[4] : ends[5]], type=RestOfTokenizer)
            self._cutter = tokenizers.Tokenizer.from_str(msgspec.json.encode(rest.tokenizer).decode())
        except Exception as error:  # the library raises bare Exception
            raise CheckpointInvalid(f"the token table is damaged: {error}") from error
        self._added = {content: added.id for content, added in rest.added.items()}
        self._special = frozenset(added.id for added in rest.added.values() if added.special)
        self._pieces: dict[bytes, list[int]] = {}
        self._library = library

    @property
    def vocab_size(self) -> int:
        return sum(self._offsets[id] != self._offsets[id + 1] for id in range(self._count))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > TEXT_MAX:
            return self._library().encode(text, add_special_tokens=add_special_tokens)
        encoding = self._cutter.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token, (begin, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if token == PIECE:
                ids += self._piece(text[begin:end].encode())
            else:
                ids.append(self._added[token])
        return ids

    def decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        texts = [
            self.piece(token)
            for token in tokens
            if 0 <= token < self._count and not (skip_special and token in self._special)
        ]
        decoded: str = self._cutter.decoder.decode([text for text in texts if text])
        return decoded

    def piece(self, token: int) -> str:
        if not 0 <= token < self._count:
            return ""
        return str(self._text[self._offsets[token] : self._offsets[token + 1]], "utf-8", "replace")

    def _piece(self, piece: bytes) -> list[int]:
        known = self._pieces.get(piece)
        if known is None:
            symbols = self._symbols
            known = self._merged([token for byte in piece if (token := symbols[byte]) != EMPTY])
            if len(piece) <= PIECE_KEPT_MAX_BYTES:
                if len(self._pieces) >= PIECES_KEPT:
                    self._pieces.clear()
                self._pieces[piece] = known
        return known

    def _merged(self, tokens: list[int]) -> list[int]:
        """Byte-pair encoding: merges the pair of the lowest rank first, the leftmost of equals.

        Merged neighbours are linked, not moved, and pairs wait in a heap: a piece of n bytes takes n log n.
        """
        count = len(tokens)
        if count < 2:
            return tokens
        before = list(range(-1, count - 1))
        after = [*range(1, count), -1]
        waiting = [
            (*merge, place)
            for place in range(count - 1)
            if (merge := self._merge(tokens[place], tokens[place + 1])) is not None
        ]
        heap = [(rank, place, merged) for rank, merged, place in waiting]
        heapify(heap)
        while heap:
            _, place, merged = heappop(heap)
            right = after[place]
            if tokens[place] < 0 or right < 0:
                continue
            now = self._merge(tokens[place], tokens[right])
            if now is None or now[1] != merged:
                continue  # one of the two has become part of something else
            tokens[place], tokens[right] = merged, -1
            after[place] = after[right]
            if after[place] >= 0:
                before[after[place]] = place
                if (merge := self._merge(merged, tokens[after[place]])) is not None:
                    heappush(heap, (merge[0], place, merge[1]))
            left = before[place]
            if left >= 0 and (merge := self._merge(tokens[left], merged)) is not None:
                heappush(heap, (merge[0], left, merge[1]))
        return [token for token in tokens if token >= 0]

    def _merge(self, left: int, right: int) -> Merge | None:
        slots, mask = self._slots, self._mask
        slot = first_slot(left, right, mask)
        for _ in range(mask + 1):
            at = 4 * slot
            found = slots[at]
            if found == left and slots[at + 1] == right:
                return slots[at + 2], slots[at + 3]
            if found == EMPTY:
                return None
            slot = (slot + 1) & mask
        return None
