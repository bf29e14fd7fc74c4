"""Splits a worker's stream (PROGRESS_HEADER) into progress events and the response proper. Pure.

Readers of events get the progress and the items of a stream; the response is stored as it would have been without
progress. Any other event counts as an item: it is the handler's own.
"""

from __future__ import annotations

import binascii
from base64 import b64decode

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.worker_headers import ERROR_HEADER, AnswerHead, retry_headers

from ..state.invocation_records import MESSAGE_MAX, ReportedProgress
from .store.event_log import error_of, without_id

_PROGRESS = b"event: progress\n"


class ProgressSplitter:
    def __init__(self) -> None:
        self.head: AnswerHead | None = None
        """Status and headers of the response, unless that is a stream."""
        self._streams = False

    def take(self, events: list[bytes]) -> tuple[list[bytes], bytes]:
        """Splits events: returns those for readers, and the bytes of the response's body."""
        shown, body = [], bytearray()
        for event in events:
            if event.startswith(_PROGRESS):
                shown.append(event)
            elif self.head is not None:
                piece = _piece(event)
                body += piece or b""
                shown += [event] if piece is None else []
            elif not self._streams and (head := _head(event)) is not None:
                self.head = head
            elif not self._streams and (error := error_of(without_id(event))) is not None:
                headers = [("content-type", "application/json"), (ERROR_HEADER, error.code)]
                headers += [(name.decode(), value.decode()) for name, value in retry_headers(error)]
                self.head = AnswerHead(status=error.status, headers=headers)
                body += _data(event)
                shown.append(event)
            else:
                self._streams = True
                body += event + b"\n\n"
                shown.append(event)
        return shown, bytes(body)


def progress_in(events: list[bytes], now_unix_ms: int) -> ReportedProgress | None:
    """The last progress among the events."""
    for event in reversed(events):
        if event.startswith(_PROGRESS):
            try:
                said = msgspec.json.decode(_data(event), type=_ProgressEvent)
            except UNDECODABLE:
                continue  # a handler's own event of that name
            if 0 <= said.fraction <= 1:
                return ReportedProgress(fraction=said.fraction, message=said.message[:MESSAGE_MAX], unix_ms=now_unix_ms)
    return None


class _ProgressEvent(msgspec.Struct, frozen=True):
    fraction: float
    message: str = ""


def _head(event: bytes) -> AnswerHead | None:
    if not event.startswith(b"event: answer\n"):
        return None
    try:
        head = msgspec.json.decode(_data(event), type=AnswerHead)
    except UNDECODABLE:
        return None
    sane = all(ord(char) < 256 and char not in "\r\n\0" for pair in head.headers for text in pair for char in text)
    return head if sane and 200 <= head.status <= 599 else None


def _piece(event: bytes) -> bytes | None:
    if not event.startswith(b"event: piece\n"):
        return None
    try:
        return b64decode(_data(event), validate=True)
    except binascii.Error:
        return None


def _data(event: bytes) -> bytes:
    return event.partition(b"\ndata: ")[2]
