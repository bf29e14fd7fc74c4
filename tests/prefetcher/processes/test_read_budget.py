"""Reading of workers is fair and bounded: the loop keeps most of its time, and quiet workers are heard at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from fleetstart.prefetcher.processes.read_budget import ALL_SHARE, OWN_SHARE, PAUSE_S, TURN_S, ReadBudget
from fleetstart.prefetcher.processes.worker_logs import LogPipe
from tests.servers import spawn


def test_shares_of_the_loops_time_are_kept() -> None:
    """Twenty workers that always have more to send, for a minute of a clock that only the readers move."""
    budget = ReadBudget()
    shares = [budget.own_share() for _ in range(20)]
    quiet, used, now_s, refused = budget.own_share(), [0.0] * 20, 100.0, 0
    while now_s < 160.0:
        for number, share in enumerate(shares):
            if share.may_read(now_s):
                now_s += TURN_S
                used[number] += TURN_S
                share.spend(TURN_S, now_s)
        assert quiet.may_read(now_s), "who sends little is not kept waiting by the others"
        now_s += PAUSE_S / 4
        refused += 1
    assert refused
    assert sum(used) < 60 * (ALL_SHARE + 20 * OWN_SHARE) + 1
    assert min(used) > 0.9 * 60 * OWN_SHARE, "each gets its own"


def test_floods_of_lines_leave_the_loop_free_and_quiet_workers_heard() -> None:
    async def scenario() -> tuple[float, float]:
        budget, pipes, floods = ReadBudget(), [], []
        for _ in range(6):
            read, write = os.pipe()
            pipe = LogPipe(read, budget.own_share())
            pipe.send_to(lambda line: None)
            pipes.append(pipe)
            floods.append(spawn(["yes"], stdout=write))
            os.close(write)
        read, write = os.pipe()
        quiet, heard = LogPipe(read, budget.own_share()), asyncio.Event()
        quiet.send_to(lambda line: heard.set())
        used_s, begun_s, waits = time.thread_time(), time.monotonic(), []
        for _ in range(10):
            heard.clear()
            sent_s = time.monotonic()
            os.write(write, b"here\n")
            await heard.wait()
            waits.append(time.monotonic() - sent_s)
            await asyncio.sleep(0.03)
        share = (time.thread_time() - used_s) / (time.monotonic() - begun_s)
        for flood in floods:
            flood.kill()
            flood.wait()
        os.close(write)
        for pipe in (*pipes, quiet):
            with contextlib.suppress(OSError):
                pipe.close()
        return share, sorted(waits)[len(waits) // 2]

    share, wait_s = asyncio.run(scenario())
    assert share < 0.8, "six own shares, that of all, and the quiet one: without them, all of the thread's time"
    assert wait_s < 0.25
