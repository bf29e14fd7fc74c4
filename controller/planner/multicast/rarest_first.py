"""Rarest block first: a schedule from any ownership of blocks, for replanning and for starts from the store.

In each step every receiver that still lacks blocks is matched with a free holder of one of them, the rarest block
first, and those that lack the most choose first. Blocks that no sending node has come from the object store, each of
them once: its receiver then passes it on. Greedy: near the optimum of b + ⌈log₂ N⌉ - 1 steps, and not always there.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schedule import STORE, Schedule, Transfer

CONSIDERED = 16
"""Senders that are compared for one receiver in one step: more make planning for many nodes slow, and gain little."""


class MissingBlocks(Exception):
    """Blocks that no node holds, and there is no store to read them from; the first argument is their bit mask."""


def rarest_first(
    held: Sequence[int], receivers: Sequence[int], senders: Sequence[int], blocks: int, *, store_readers: int = 0
) -> Schedule:
    """Schedule after which each of the receivers has all blocks. `store_readers`: how many nodes read from the store at
    once; 0: there is no store. Errors: MissingBlocks."""
    return _Matching(list(held), receivers, senders, blocks, store_readers).run()


class _Matching:
    def __init__(
        self, has: list[int], receivers: Sequence[int], senders: Sequence[int], blocks: int, store_readers: int
    ) -> None:
        self._has, self._all, self._blocks = has, (1 << blocks) - 1, blocks
        self._receivers, self._store_readers = receivers, store_readers
        self._senders = list(senders)
        self._copies = [0] * blocks
        for sender in senders:
            for block in bits(has[sender]):
                self._copies[block] += 1
        self._sends = set(senders)
        self._read = 0
        """Bit mask of the blocks that a sender has read from the store: once is enough."""

    def run(self) -> Schedule:
        schedule: Schedule = []
        lacking = [receiver for receiver in self._receivers if self._has[receiver] != self._all]
        step = 0
        while lacking:
            moved = self._step(step, lacking)
            if not moved:
                raise MissingBlocks(self._all & ~self._held_by_senders())
            for _, _, receiver, block in moved:
                self._has[receiver] |= 1 << block
                if receiver in self._sends:
                    self._copies[block] += 1
            schedule += moved
            lacking = [receiver for receiver in lacking if self._has[receiver] != self._all]
            step += 1
        return schedule

    def _step(self, step: int, lacking: list[int]) -> Schedule:
        poorest = sorted(lacking, key=lambda receiver: (self._has[receiver].bit_count(), receiver))
        moved = self._from_store(step, poorest)
        reading = {transfer.receiver for transfer in moved}
        free = list(self._senders)
        chosen = [0] * self._blocks
        """How often each block is sent in this step: different ones are better than copies of one."""
        for receiver in poorest:
            if receiver in reading:
                continue
            found = self._match(receiver, free, chosen, step)
            if found is not None:
                sender, block = found
                chosen[block] += 1
                moved.append(Transfer(step, sender, receiver, block))
        return moved

    def _match(self, receiver: int, free: list[int], chosen: list[int], step: int) -> tuple[int, int] | None:
        """The free sender whose best block for the receiver is the rarest; takes it from `free`."""
        lacks = self._all & ~self._has[receiver]
        best: tuple[int, int, int] | None = None
        considered = 0
        for place, sender in enumerate(free):
            useful = self._has[sender] & lacks
            if not useful or sender == receiver:
                continue
            rarity, _, block = min([(self._copies[b] + chosen[b], (b - step) % self._blocks, b) for b in bits(useful)])
            best = min(best, (rarity, place, block)) if best is not None else (rarity, place, block)
            considered += 1
            if considered == CONSIDERED:
                break
        if best is None:
            return None
        _, place, block = best
        return free.pop(place), block

    def _from_store(self, step: int, poorest: list[int]) -> Schedule:
        """Reads of blocks that no sender has and none was told to read. Who may not send reads only what none will
        have."""
        lost = self._all & ~self._read
        for sender in self._senders:
            lost &= ~self._has[sender]
        if not self._store_readers or not lost:
            return []
        forwarding = [receiver for receiver in poorest if receiver in self._sends]
        moved: Schedule = []
        for receiver in (forwarding or poorest)[: self._store_readers]:
            wanted = lost & ~self._has[receiver]
            if not wanted:
                continue
            block = bits(wanted)[0]
            if forwarding:
                lost &= ~(1 << block)
                self._read |= 1 << block
            moved.append(Transfer(step, STORE, receiver, block))
        return moved

    def _held_by_senders(self) -> int:
        held = 0
        for sender in self._senders:
            held |= self._has[sender]
        return held


def bits(mask: int) -> list[int]:
    """Numbers of the bits that are set, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
