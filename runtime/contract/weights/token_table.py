"""The token table: a tokenizer in binary form, built once at publish, used in place by workers.

tokenizer.json is text: to parse it costs each worker a tenth of a second and tens of megabytes before its first
token. Byte-level BPE needs little of it, so a publisher lays that out as arrays, which a worker reads in place:

| part | holds |
| --- | --- |
| head | magic, sizes of the parts below: 8 bytes and five u32 |
| bytes | u32 [256]: the token of each single byte; EMPTY for one that the tokenizer drops |
| offsets | u32 [tokens + 1]: where each token's text begins; an empty one is no token |
| merges | u32 [slots][4]: left, right, rank, merged; a hash table with linear probing, left = EMPTY in a free slot |
| text | UTF-8 of all tokens' texts, one after the other, as the vocabulary writes them |
| rest | JSON: RestOfTokenizer, everything else |

Little-endian. The file travels beside tokenizer.json, which stays what other tools open and what a reader falls back
to. Written by `controller.cli.weights`, read by `runtime.llm.text`.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

FILE = "tokenizer.fs-table"
"""Name of the file. Users' files have no such suffix, so it cannot collide."""
MAGIC = b"FSTOKEN1"
HEAD = struct.Struct("<8s5I")
"""magic, tokens, slots, bytes of text, bytes of rest, zero."""
EMPTY = 0xFFFF_FFFF
PIECE = "\u0000piece"
"""The token that the stand-in model of `rest` gives for a piece of text that is no added token."""


class AddedToken(msgspec.Struct, frozen=True):
    id: int
    special: bool


class RestOfTokenizer(msgspec.Struct, frozen=True):
    tokenizer: dict[str, Any]
    """tokenizer.json with a model that knows PIECE alone: it finds added tokens and cuts text into pieces."""
    added: dict[str, AddedToken]


def first_slot(left: int, right: int, mask: int) -> int:
    """The slot at which probing for a pair begins; `mask` is the number of slots, a power of two, less one."""
    return (left * 0x9E37_79B1 + right * 0x85EB_CA77 >> 7) & mask
