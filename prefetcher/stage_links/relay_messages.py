"""Objects of a relayed link: consecutive, keyed by sequence number, each encrypted under the pipeline's secret.

Each object is sealed (AES-256-GCM) together with its key and kind, so an object of another link, of another position or
of another writer is detected, and readers of the bucket learn no more than sizes and times.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.object_keys import RELAY

from .pipeline_key import derived

MAGIC = b"fsr2"
NONCE_BYTES, TAG_BYTES = 12, 16
MORE, LAST = b"+", b"."
HEAD_BYTES = len(MAGIC) + 1 + NONCE_BYTES + TAG_BYTES
"""What an object has beside its payload; the tag stands at its end."""
OBJECT_BYTES = 1 << 20
"""Payload of one object: at 100 MB/s it takes as long as the request itself."""


class InvalidRelayObject(Exception):
    """An object that the link's sender did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLink:
    """One stage's way to another one; the other direction is a link of its own."""

    pipeline: PipelineId
    sender: int
    receiver: int
    secret: str

    @property
    def folder(self) -> str:
        return f"{RELAY}{self.pipeline}/{self.sender}-{self.receiver}/"

    def key(self, sequence: int) -> str:
        return f"{self.folder}{sequence:010d}"

    def seal(self, sequence: int, data: bytes, *, last: bool = False) -> bytes:
        """The object with this sequence number. `last` ends the link."""
        kind, nonce = LAST if last else MORE, os.urandom(NONCE_BYTES)
        return b"".join((MAGIC, kind, nonce, _cipher(self.secret).encrypt(nonce, data, self._bound_to(sequence, kind))))

    def unseal(self, sequence: int, sealed: bytes) -> tuple[bytes, bool]:
        """Checks and decrypts an object; returns its payload, and whether it is the last. Errors:
        InvalidRelayObject."""
        start = len(MAGIC) + 1
        kind, nonce = sealed[len(MAGIC) : start], sealed[start : start + NONCE_BYTES]
        if not sealed.startswith(MAGIC) or kind not in (MORE, LAST) or len(sealed) < HEAD_BYTES:
            raise InvalidRelayObject(f"{self.key(sequence)}: {len(sealed)} bytes that are no object of a link")
        try:
            data = _cipher(self.secret).decrypt(nonce, sealed[start + NONCE_BYTES :], self._bound_to(sequence, kind))
        except InvalidTag as error:
            raise InvalidRelayObject(
                f"{self.key(sequence)} was not written by stage {self.sender} of this pipeline"
            ) from error
        return data, kind == LAST

    def _bound_to(self, sequence: int, kind: bytes) -> bytes:
        return self.key(sequence).encode() + b"\0" + kind


@functools.lru_cache(maxsize=64)
def _cipher(secret: str) -> AESGCM:
    return AESGCM(derived(secret, b"fleetstart relay 2"))
