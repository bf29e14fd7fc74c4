"""What a link between two stages is in the object store: objects that follow each other, each with its place for key.

Only who knows the pipeline's secret can make one: each carries a keyed digest of its place and its bytes, so that an
object of another link, of another place or of nobody is told from the next one. Against who reads the bucket it does
not protect: the stages' own words are in it as they are.
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
"""Of a stage's bytes, in one object: at 100 MB/s as long on its way as the request itself."""


class InvalidRelayObject(Exception):
    """An object that the link's sender did not write there."""


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
        """The object at that place; `last`: the sender has no more to say."""
        kind = LAST if last else MORE
        return b"".join((MAGIC, kind, self._digest(sequence, kind, data), data))

    def verify(self, sequence: int, sealed: bytes) -> tuple[bytes, bool]:
        """Its bytes, and whether it is the last. Errors: NotOfThisLink."""
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
