"""Objects of a relayed link: consecutive, keyed by sequence number, each authenticated by the pipeline's secret.

Each object carries a keyed digest of its key and its bytes, so an object of another link, of another position or of
another writer is detected. The digest does not hide the content from readers of the bucket.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.object_keys import RELAY

MAGIC = b"fsr1"
DIGEST_BYTES = 32
MORE, LAST = b"+", b"."
HEAD_BYTES = len(MAGIC) + 1 + DIGEST_BYTES
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

    def sign(self, sequence: int, data: bytes, *, last: bool = False) -> bytes:
        """The object with this sequence number. `last` ends the link."""
        kind = LAST if last else MORE
        return b"".join((MAGIC, kind, self._digest(sequence, kind, data), data))

    def verify(self, sequence: int, sealed: bytes) -> tuple[bytes, bool]:
        """Checks an object; returns its payload, and whether it is the last. Errors: InvalidRelayObject."""
        kind, data = sealed[len(MAGIC) : len(MAGIC) + 1], sealed[HEAD_BYTES:]
        if not sealed.startswith(MAGIC) or kind not in (MORE, LAST) or len(sealed) < HEAD_BYTES:
            raise InvalidRelayObject(f"{self.key(sequence)}: {len(sealed)} bytes that are no object of a link")
        if not hmac.compare_digest(sealed[len(MAGIC) + 1 : HEAD_BYTES], self._digest(sequence, kind, data)):
            raise InvalidRelayObject(f"{self.key(sequence)} was not written by stage {self.sender} of this pipeline")
        return data, kind == LAST

    def _digest(self, sequence: int, kind: bytes, data: bytes) -> bytes:
        key = hashlib.sha256(self.secret.encode()).digest()
        digest = hashlib.blake2b(self.key(sequence).encode() + b"\0" + kind, key=key, digest_size=DIGEST_BYTES)
        digest.update(data)
        return digest.digest()
