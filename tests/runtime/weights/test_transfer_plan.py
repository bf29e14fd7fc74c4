"""Laws of the order in which chunks move to a device, over any order in which they arrive and are asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleetstart.runtime.weights.transfer_plan import LOOKAHEAD_CHUNKS, CopyPiece, TransferPlan

AT_MOST = 4


def everything(chunk: int) -> bool:
    return True


def drained(transfer: TransferPlan, is_ready: Callable[[int], bool] = everything) -> list[CopyPiece]:
    pieces = []
    while piece := transfer.take(is_ready, AT_MOST):
        pieces.append(piece)
        transfer.moved(piece)
    return pieces


chunk_sets = st.sets(st.integers(0, 40), max_size=30)


class Loads(RuleBasedStateMachine):
    """A loader with any number of threads, readers who ask, and chunks that come in any order."""

    @initialize(chunks=chunk_sets, first=st.lists(st.integers(0, 40), max_size=5))
    def begin(self, chunks: set[int], first: list[int]) -> None:
        self.chunks = chunks
        self.transfer = TransferPlan(chunks, first=first)
        self.ready: set[int] = set()
        self.urgent = set(first) & chunks
        self.moving: list[CopyPiece] = []
        self.taken: set[int] = set()
        self.moved: set[int] = set()

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.ready |= data.draw(st.sets(st.integers(0, 40), max_size=8))

    @rule(chunks=st.lists(st.integers(0, 45), max_size=4))
    def demand(self, chunks: list[int]) -> None:
        self.transfer.demand(chunks)
        self.urgent |= set(chunks) & self.chunks - self.taken
        waiting = [chunk for chunk in chunks if chunk in self.chunks - self.taken]
        if waiting:
            assert self.transfer.front == waiting[0]

    @rule()
    def take(self) -> None:
        piece = self.transfer.take(self.ready.__contains__, AT_MOST)
        could = (self.chunks - self.taken) & self.ready
        assert (piece is None) == (not could)
        if piece is None:
            return
        assert 1 <= piece.count <= AT_MOST
        assert set(piece.chunks) <= could  # ready, wanted, and taken by nobody
        assert piece.urgent == bool(could & self.urgent)  # what is urgent goes first, wherever it lies
        assert piece.slot == sorted(self.chunks).index(piece.chunk)
        self.taken |= set(piece.chunks)
        self.moving.append(piece)

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        piece = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        self.transfer.moved(piece)
        self.moved |= set(piece.chunks)

    @invariant()
    def agrees_on_what_has_moved(self) -> None:
        assert {chunk for chunk in self.chunks if self.transfer.has_moved(chunk)} == self.moved
        assert self.transfer.finished == (self.moved == self.chunks)
        assert (self.transfer.front is None) == (self.taken == self.chunks)

    def teardown(self) -> None:
        if hasattr(self, "transfer"):
            for piece in drained(self.transfer):
                assert not self.taken & set(piece.chunks)
                self.taken |= set(piece.chunks)
            assert self.taken == self.chunks


TestLoads = pytest.mark.slow(Loads.TestCase)


@given(chunk_sets)
def test_neighbours_in_the_segment_are_neighbours_on_the_device(chunks: set[int]) -> None:
    transfer = TransferPlan(chunks)
    assert transfer.slot_count == len(chunks)
    assert sorted(map(transfer.slot, chunks)) == list(range(len(chunks)))
    for chunk in chunks:
        if chunk + 1 in chunks:
            assert transfer.slot(chunk + 1) == transfer.slot(chunk) + 1


def test_without_wishes_chunks_move_in_the_segments_order_in_large_pieces() -> None:
    pieces = drained(TransferPlan(range(10)))
    assert [(piece.chunk, piece.count) for piece in pieces] == [(0, 4), (4, 4), (8, 2)]
    assert not any(piece.urgent for piece in pieces)


def test_what_was_asked_for_first_goes_first_and_what_is_demanded_before_that() -> None:
    transfer = TransferPlan(range(12), first=[6, 7])
    transfer.demand([9])
    assert [(piece.chunk, piece.count, piece.urgent) for piece in drained(transfer)] == [
        (9, 1, True), (6, 2, True), (0, 4, False), (4, 2, False), (8, 1, False), (10, 2, False),
    ]  # fmt: skip


def test_a_chunk_that_lags_holds_up_no_other() -> None:
    transfer = TransferPlan(range(6), first=[2])
    assert [piece.chunk for piece in drained(transfer, lambda chunk: chunk not in (0, 2))] == [1, 3]
    assert transfer.front == 2
    assert [piece.chunk for piece in drained(transfer)] == [2, 0]


def test_looking_ahead_has_an_end() -> None:
    far = LOOKAHEAD_CHUNKS
    transfer = TransferPlan(range(far + 2))
    asked: list[int] = []

    def none_ready(chunk: int) -> bool:
        asked.append(chunk)
        return False

    assert transfer.take(none_ready, AT_MOST) is None
    assert asked == list(range(far))
