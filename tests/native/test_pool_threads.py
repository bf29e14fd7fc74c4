"""Slab pools that several threads use at once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from tests.native.neighbours import PATIENCE_S, SLAB, Pages, lets_others_run
from tests.native.pools import CAPACITY, counts, is_zero, pool_of, soil


def run_together(*works: Callable[[], None]) -> None:
    """Each in a thread; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_threads_that_prepare_take_and_drop_get_zeros_and_lose_nothing(pages: Pages) -> None:
    pool = pool_of(pages, capacity=6)
    over = threading.Event()
    short = 0

    def prepare() -> None:
        while not over.is_set():
            pool.prepare(3)

    def give_back() -> None:
        while not over.is_set():
            pool.release(1)
            over.wait(0.01)

    def use() -> None:
        nonlocal short
        for size in [SLAB, 3 * SLAB, 2 * SLAB - 5] * 10:
            try:
                region = pool.take(size)
            except OSError as error:
                assert error.errno == errno.ENOMEM  # noqa: PT017
                short += 1
            else:
                assert is_zero(region)
                soil(region)
            assert sum(counts(pool)) <= 6

    def users() -> None:
        try:
            run_together(use, use, use)
        finally:
            over.set()

    run_together(users, prepare, prepare, give_back)
    assert short < 90
    assert pool.used == 0
    assert is_zero(pool.take(6 * SLAB))


def test_slabs_that_are_being_cleared_are_not_missed_by_who_needs_them_all(pages: Pages) -> None:
    pool = pool_of(pages)
    over = threading.Event()

    def prepare() -> None:
        while not over.is_set():
            pool.prepare(CAPACITY)

    def use() -> None:
        try:
            for _ in range(40):
                soil(pool.take(CAPACITY * SLAB))
        finally:
            over.set()

    run_together(use, prepare, prepare)


def test_threads_that_prepare_together_make_no_more_than_is_wanted(pages: Pages) -> None:
    for _ in range(10):
        pool = pool_of(pages, capacity=8)
        pool.release(8)
        run_together(*[lambda pool=pool: pool.prepare(2)] * 4)
        assert counts(pool) == (0, 2, 0)


def test_taking_and_preparing_let_other_threads_run(pages: Pages) -> None:
    pool = pool_of(pages, capacity=8)
    assert lets_others_run(lambda: (pool.release(8), pool.prepare(8)))
    soil(pool.take(8 * SLAB))
    assert lets_others_run(lambda: pool.take(8 * SLAB))
