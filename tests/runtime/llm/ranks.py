"""Split models whose ranks are threads of this process, with their real collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import NoReturn

import torch

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.runner import Batch
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.model.loader import decoder_builder
from fleetstart.runtime.llm.model.shard import Shard
from fleetstart.runtime.llm.model.weights import ModelWeights
from fleetstart.runtime.llm.tensor_parallel.collectives import RankGroup, dist
from fleetstart.runtime.llm.tensor_parallel.loader import Step, load_shard
from fleetstart.runtime.llm.tensor_parallel.runner import TensorParallelRunner
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import BLOCK_TOKENS, config_of

WAIT_S = 60.0
CPU = torch.device("cpu")


class ThreadedRanks:
    """The ranks beside the first one."""

    def __init__(self) -> None:
        self.queues: list[SimpleQueue[Batch | None]] = []
        self.threads: list[threading.Thread] = []

    def begin(self, step: Callable[[Batch], None]) -> None:
        queue: SimpleQueue[Batch | None] = SimpleQueue()

        def serve() -> None:
            while (batch := queue.get()) is not None:
                step(batch)

        self.queues.append(queue)
        self.threads.append(threading.Thread(target=serve, daemon=True))
        self.threads[-1].start()

    def send(self, batch: Batch) -> None:
        for queue in self.queues:
            queue.put(batch)

    def lost(self, reason: str) -> NoReturn:
        raise AssertionError(reason)

    def close(self) -> None:
        self.send(None)  # type: ignore[arg-type]
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@contextmanager
def split_engine(weights_of: Callable[[Shard], ModelWeights], count: int, *, dtype: str = "fp32") -> Iterator[Engine]:
    """An engine over so many ranks, each with weights of its own."""
    settings = LLMSettings(dtype=dtype, max_context_tokens=512, kv_memory_bytes=64 * MIB)  # type: ignore[arg-type]
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=WAIT_S))
    groups: dict[int, RankGroup] = {}

    def meet(rank: int) -> None:
        groups[rank] = RankGroup(Shard(rank, count), dist.PrefixStore("ranks", store), CPU)

    meeting = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(count)]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join(WAIT_S)
    decoders = []
    for rank in range(count):
        shard = Shard(rank, count)
        built = decoder_builder(weights_of(shard), settings, threads=1, device="cpu", whole=False)
        decoders.append(load_shard(built, shard, groups[rank])[0])
    ranks = ThreadedRanks()
    for decoder in decoders[1:]:
        ranks.begin(Step(decoder))
    whole = weights_of(Shard(0, count))
    scheduler = Scheduler(
        BlockPool(decoders[0].block_count, BLOCK_TOKENS), max_batch=8, token_budget=24, context_tokens=512,
        share_prefixes=True,
    )  # fmt: skip
    tokenizer = Tokenizer(whole.file("tokenizer.json"))
    try:
        yield Engine(TensorParallelRunner(decoders[0], ranks), scheduler, tokenizer, config_of(whole).eos_ids)
    finally:
        ranks.close()
