"""Segments lent to processes that the node has not started: right bytes, pinned while read, verified before they are
used, refused with the reason."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fleetstart.prefetcher.segments.local_readers import LocalReaders
from fleetstart.prefetcher.segments.store import SegmentStore
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError, Unavailable, WeightsMissing
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.node.messages import READERS_SOCKET
from fleetstart.runtime.llm.vllm_engine.load_format import source
from fleetstart.runtime.llm.vllm_engine.node_segment import segment_weights
from tests.forgery import FORGED_BYTES, forge
from tests.prefetcher.nodes import CHUNK_BYTES, Store
from tests.prefetcher.segment_cases import run
from tests.servers import until

TIMEOUT_S = 30.0
Scenario = Callable[[SegmentStore], Coroutine[Any, Any, None]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An FS_HOME whose path is longer than the address of a socket."""
    return tmp_path / ("h" * 100)


def lending(store: Store, home: Path, scenario: Scenario) -> None:
    async def main(segments: SegmentStore) -> None:
        readers = LocalReaders(home / READERS_SOCKET, segments)
        readers.open()
        try:
            await scenario(segments)
        finally:
            await readers.close()
        assert not (home / READERS_SOCKET).exists()

    run(FolderSource(store.folder), main)


def read(home: Path, checkpoint: CheckpointId) -> bytes:
    with segment_weights(home, checkpoint, timeout_s=TIMEOUT_S) as weights:
        return bytes(weights["t0"].numpy())


def test_a_reader_gets_the_bytes_that_were_published(store: Store, home: Path) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    checkpoint = store.put_checkpoint(data, digests=True)

    async def scenario(segments: SegmentStore) -> None:
        assert stat.S_IMODE((home / READERS_SOCKET).stat().st_mode) == 0o600
        assert await asyncio.to_thread(read, home, checkpoint) == data
        (store.folder / f"checkpoints/{checkpoint}/part-00000.safetensors").unlink()
        assert await asyncio.to_thread(read, home, checkpoint) == data, "from memory: the file is gone"
        await until(lambda: not segments.budget.segments[checkpoint].pins)

    lending(store, home, scenario)


def test_a_segment_is_pinned_until_its_reader_is_gone(store: Store, home: Path) -> None:
    checkpoint = store.put_checkpoint(os.urandom(CHUNK_BYTES))

    async def scenario(segments: SegmentStore) -> None:
        lent = segment_weights(home, checkpoint, timeout_s=TIMEOUT_S)
        await asyncio.to_thread(lent.__enter__)
        assert len(segments.budget.segments[checkpoint].pins) == 1
        await asyncio.to_thread(lent.__exit__, None, None, None)
        await until(lambda: not segments.budget.segments[checkpoint].pins)

    lending(store, home, scenario)


def test_the_load_format_reads_the_segment_that_an_id_names(store: Store, home: Path) -> None:
    checkpoint = store.put_checkpoint(b"abc")

    def load() -> dict[str, bytes]:
        with source({"checkpoint": checkpoint, "home": str(home)}) as weights:
            return {name: bytes(tensor.numpy()) for name, tensor in weights.items()}

    async def scenario(segments: SegmentStore) -> None:
        assert await asyncio.to_thread(load) == {"t0": b"abc"}

    lending(store, home, scenario)


def test_forged_weights_are_refused_before_they_are_used(store: Store, home: Path) -> None:
    data = os.urandom(2 * CHUNK_BYTES)
    checkpoint = store.put_checkpoint(data, digests=True)
    path = store.folder / f"checkpoints/{checkpoint}/part-00000.safetensors"
    whole = path.read_bytes()
    begin = len(whole) - len(data)
    path.write_bytes(whole[:begin] + forge(data[:CHUNK_BYTES], b"f" * FORGED_BYTES) + whole[begin + CHUNK_BYTES :])

    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(ChecksumMismatch):
            await asyncio.to_thread(read, home, checkpoint)

    lending(store, home, scenario)


def test_what_cannot_be_lent_is_refused_with_the_reason(store: Store, home: Path) -> None:
    async def scenario(segments: SegmentStore) -> None:
        with pytest.raises(WeightsMissing):
            await asyncio.to_thread(read, home, CheckpointId("0" * 64))

    lending(store, home, scenario)
    with pytest.raises(Unavailable, match=r"no node listens at .*segments.sock") as refused:
        read(home, CheckpointId("0" * 64))
    assert isinstance(refused.value, FleetError)
    assert "FS_HOME" in refused.value.hint
