"""Allocation of chunks to sources: who may deliver a chunk, and who takes which next. No threads and no clock.

Each source has a queue of the chunks that it may take; what one takes leaves the queues of the others. A costly source
has in its queue only what nobody else may deliver, and looks into the others' where they are much slower (`choice`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from fleetstart.runtime.contract.weights.manifest import ChunkRange

from .choice import Load, SourceRate, bytes_to_leave
from .chunk_sources import FetchSource
from .order import FetchOrder, run_length
from .pulls import PullPlan

STRIKES_MAX = 2
"""Failures after which a fetch does without a source that it can spare."""


class SourceWork:
    """One source: what it has, what it may take, how quick it is."""

    def __init__(self, source: FetchSource) -> None:
        self.source = source
        self.threads = source.threads
        self.run_bytes = source.source.run_bytes
        self.has = {chunk.index: chunk for chunk in source.chunks}
        self.order = FetchOrder(())
        self.running = 0
        self.background_threads = 0
        """Threads that fetch background chunks."""
        self.failures: Counter[int] = Counter()
        self.excluded: set[int] = set()
        """Chunks that it could not deliver."""
        self.late: set[int] = set()
        """Those of them with which it was only late."""
        self.strikes = 0
        self.corrupt = 0
        self.is_dropped = False
        self.under_way_bytes = 0
        self.rate = SourceRate(source.bytes_per_s, source.patience_s)

    def can(self, chunk: int) -> bool:
        return chunk in self.has and chunk not in self.excluded and not self.is_dropped

    def load(self, now_s: float) -> Load:
        return Load(self.rate.at(now_s), self.under_way_bytes, self.source.costly)


class Allocation:
    """The sources of one fetch and their queues. Not thread-safe."""

    def __init__(self) -> None:
        self.works: list[SourceWork] = []
        self._plan = PullPlan()
        self._chunks: dict[int, ChunkRange] = {}

    def add(self, source: FetchSource, is_free: Callable[[int], bool], wanted: Iterable[int]) -> None:
        """One more source. `is_free`: whether nobody has delivered the chunk or is about to; `wanted`: all that is."""
        work = SourceWork(source)
        self.works.append(work)
        self.extend(len(self.works) - 1, source.chunks, is_free, wanted)

    def extend(
        self, index: int, chunks: Iterable[ChunkRange], is_free: Callable[[int], bool], wanted: Iterable[int]
    ) -> None:
        """More chunks that a source has. Those that the plan has from some source are taken when their pull begins."""
        work = self.works[index]
        new = [chunk for chunk in chunks if is_free(chunk.index)]
        work.has.update((chunk.index, chunk) for chunk in chunks)
        work.order.want(wanted)
        self._chunks.update((chunk.index, chunk) for chunk in new)
        for chunk in new:
            places = self._places(chunk.index)
            if work not in places or self._plan.owner(chunk.index) is not None:
                continue
            work.order.append([chunk])
            for other in self.works if not work.source.costly else ():
                if other.source.costly:
                    other.order.remove([chunk.index])

    # ── requests ───────────────────────────────────────────────────────────────────────────────────

    def want(self, chunks: Sequence[int]) -> None:
        for work in self.works:
            work.order.want(chunks)
            work.order.remove(chunk for chunk in chunks if self._plan.owner(chunk) is not None)

    def prioritize(self, chunks: Sequence[int]) -> None:
        for work in self.works:
            work.order.prioritize(chunks)

    def put_back(self, chunks: Iterable[ChunkRange]) -> None:
        """Returns chunks to the front of the queues of those that may deliver them. Of a chunk that nobody could
        deliver, all may try again."""
        for chunk in reversed(list(chunks)):
            if not self._places(chunk.index) and not self.excuse_late(chunk.index):
                self.forgive(chunk.index)
            for work in self._places(chunk.index):
                work.order.put_back([chunk])

    def advance(self, is_awaited: Callable[[int], bool], is_free: Callable[[int], bool]) -> None:
        """Lets the next pulls of the plan begin."""
        for pull in self._plan.advance(is_awaited):
            work = self.works[pull.source_index]
            free = [self._chunks[chunk] for chunk in pull.chunks if chunk in self._chunks and is_free(chunk)]
            own = [chunk for chunk in free if self._plan.owner(chunk.index) == pull.source_index]
            work.order.append(chunk for chunk in own if work.can(chunk.index))
            for chunk in own:
                if not work.can(chunk.index):
                    self._plan.release(chunk.index)
                    self.put_back([chunk])

    def replan(self, plan: PullPlan, is_free: Callable[[int], bool], missing: Collection[int]) -> None:
        """Another plan of pulls takes the place of the one so far."""
        self._plan = plan
        free = [chunk for chunk in sorted(missing) if is_free(chunk) and chunk in self._chunks]
        for work in self.works:
            work.order.remove(free)
        self.put_back(self._chunks[chunk] for chunk in free if plan.owner(chunk) is None)

    # ── who takes what ─────────────────────────────────────────────────────────────────────────────

    def _places(self, chunk: int) -> list[SourceWork]:
        """Sources in whose queues the chunk belongs: of those that may deliver it, the cheap ones, else the costly."""
        owner = self._plan.owner(chunk)
        if owner is not None and not self.works[owner].can(chunk):
            self._plan.release(chunk)
            owner = None
        able = [work for index, work in enumerate(self.works) if work.can(chunk) and owner in (None, index)]
        return [work for work in able if not work.source.costly] or able

    def size_of(self, chunks: Iterable[int]) -> int:
        """Bytes of these chunks."""
        return sum(self._chunks[chunk].size_bytes for chunk in chunks if chunk in self._chunks)

    def is_planned(self, index: int, chunk: int) -> bool:
        """True if the plan has the chunk from this source."""
        return self._plan.owner(chunk) == index

    def others(self, index: int, chunk: int) -> list[int]:
        """Other sources that may deliver the chunk."""
        return [other for other, work in enumerate(self.works) if other != index and work.can(chunk)]

    def next_wanted(self, index: int, now_s: float) -> tuple[FetchOrder, int] | None:
        """The wanted chunk that the source should take next, and the queue that it is in; None: it leaves all."""
        work = self.works[index]
        if work.is_dropped:
            return None
        if work.order.pending_bytes:
            found = self._first(work, work.order, now_s)
            if found is not None or not work.source.costly:
                return (work.order, found) if found is not None else None
        if not work.source.costly:
            return None
        for other in self.works:
            if not other.source.costly and other.order.pending_bytes:
                found = self._first(work, other.order, now_s)
                if found is not None:
                    return other.order, found
        return None

    def _first(self, work: SourceWork, order: FetchOrder, now_s: float) -> int | None:
        """The first chunk of the queue that the source is expected to finish soonest."""
        if len(self.works) == 1:
            return next(order.pending()).index
        leaves: dict[tuple[int, ...], float] = {}
        ahead_bytes = 0
        for chunk in order.pending():
            if not self._is_for(work, chunk.index):
                continue
            rivals = tuple(
                index for index, other in enumerate(self.works) if other is not work and self._may(other, chunk)
            )
            if rivals not in leaves:
                loads = [self.works[rival].load(now_s) for rival in rivals]
                leaves[rivals] = bytes_to_leave(work.load(now_s), loads, chunk.size_bytes)
                if leaves[rivals] == float("inf"):
                    return None
            if ahead_bytes >= leaves[rivals]:
                return chunk.index
            ahead_bytes += chunk.size_bytes
        return None

    def _may(self, work: SourceWork, chunk: ChunkRange) -> bool:
        """True if the source may take the chunk next: it is in its queue, or it is costly and looks into others'."""
        return chunk.index in work.order or (work.source.costly and self._is_for(work, chunk.index))

    def _is_for(self, work: SourceWork, chunk: int) -> bool:
        """True if the source may deliver the chunk, and no plan has it from another."""
        owner = self._plan.owner(chunk)
        return work.can(chunk) and (owner is None or self.works[owner] is work)

    def take_wanted(self, index: int, now_s: float) -> list[ChunkRange]:
        """Takes the next run of wanted chunks; empty if the source leaves them to others."""
        found = self.next_wanted(index, now_s)
        if found is None:
            return []
        work, (order, first) = self.works[index], found
        most_bytes = run_length(work.run_bytes, self._share_bytes(work, order, first, now_s), work.threads)
        run = order.next_run(most_bytes, None if next(order.pending()).index == first else first)
        run = self._only(work, order, run)
        self._taken(run)
        return run

    def take_background(self, index: int, most_bytes: int) -> list[ChunkRange]:
        work = self.works[index]
        run = work.order.next_background_run(min(most_bytes, work.run_bytes))
        self._taken(run)
        return run

    def _share_bytes(self, work: SourceWork, order: FetchOrder, first: int, now_s: float) -> int:
        """The part of the queue that the source will read, if all that have its chunks read as much as their rates."""
        rates = [other.rate.at(now_s) for other in self.works if other is not work and first in other.order]
        own = work.rate.at(now_s)
        if own is None or any(rate is None for rate in rates):
            return order.pending_bytes // (1 + len(rates))
        return int(order.pending_bytes * own / max(1e-9, own + sum(rate or 0.0 for rate in rates)))

    def _only(self, work: SourceWork, order: FetchOrder, run: list[ChunkRange]) -> list[ChunkRange]:
        """The part of the run that the source may deliver; the rest goes back."""
        count = next((number for number, chunk in enumerate(run) if not self._is_for(work, chunk.index)), len(run))
        order.put_back(run[count:])
        return run[:count]

    def _taken(self, run: Sequence[ChunkRange]) -> None:
        indices = [chunk.index for chunk in run]
        for work in self.works:
            work.order.remove(indices)

    # ── failures ───────────────────────────────────────────────────────────────────────────────────

    def exclude(self, index: int, chunk: int, *, late: bool = False) -> None:
        """The source delivers this chunk no more; any other may. One that was only late may be excused."""
        work = self.works[index]
        work.excluded.add(chunk)
        (work.late.add if late else work.late.discard)(chunk)
        self._plan.release(chunk)

    def excuse_late(self, chunk: int) -> list[int]:
        """Sources that were late with the chunk may deliver it again, as no other does; returns them."""
        excused = [index for index, work in enumerate(self.works) if chunk in work.late and not work.is_dropped]
        for index in excused:
            self.works[index].excluded.discard(chunk)
            self.works[index].late.discard(chunk)
        return excused

    def forgive(self, chunk: int) -> None:
        """All sources may try the chunk anew."""
        for work in self.works:
            work.excluded.discard(chunk)
            work.late.discard(chunk)
            work.failures.pop(chunk, None)

    def drop(self, index: int, is_free: Callable[[int], bool]) -> bool:
        """Does without a source from now on; False if the fetch cannot."""
        work = self.works[index]
        if not work.source.spare or all(other.source.spare for other in self.works):
            return False
        work.is_dropped = True
        left = [*work.order.pending(), *work.order.background()]
        work.order = FetchOrder(())
        released = [self._chunks[chunk] for chunk in self._plan.release_source(index) if chunk in self._chunks]
        self.put_back(left)
        self.put_back(chunk for chunk in released if is_free(chunk.index))
        return True
