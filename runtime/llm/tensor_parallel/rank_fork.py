"""Fork of the other ranks of a model from its worker, as it was assigned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ...contract.errors import InvalidSpec
from ...contract.node.messages import Assign
from ...weights.lora import with_adapter
from ...weights.weights import attach_segments
from .rank_process import RankPlace, RankProcesses


def fork_ranks(assign: Assign, segment_fds: Sequence[int], on_lost: Callable[[str], NoReturn]) -> RankProcesses:
    """Forks them, each with the descriptors of the segments. Call it in a single-threaded process that is confined.

    `on_lost` ends this process; it is called with the reason. Errors: InvalidSpec for fewer devices than ranks.
    """
    settings, binding = assign.spec.llm, assign.binding
    assert settings is not None
    ranks, devices = settings.tensor_parallel_size, len(binding.devices) if binding is not None else 0
    if binding is None or devices < ranks:
        raise InvalidSpec(
            f"llm: tensor_parallel_size={ranks} takes {ranks} devices, and the worker has {devices}",
            hint=f"deploy it again with gpu={ranks}",
        )

    def become_rank(place: RankPlace) -> NoReturn:
        from .loader import serve_rank  # late: the first rank imports it beside its weights

        deadline_ns = time.monotonic_ns() + round(assign.spec.start_timeout_s * 1e9)
        weights = with_adapter(attach_segments(assign.slabs, segment_fds, deadline_ns=deadline_ns))
        assert weights is not None
        serve_rank(weights, settings, place, threads=assign.threads)

    return RankProcesses(ranks, binding, become_rank, on_lost, kept=segment_fds)
