"""Sampling inside vLLM by the platform's own sampler: seeds, penalties, biases, grammars and resumes are the same
whichever engine computes the logits.

vLLM lets a processor change the logits of a batch. Ours chooses the token of each row that is not plainly greedy, and
leaves that token alone. Log probabilities are taken before, from the model's logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.generation import Request
from ..engine.sampler import SamplerState, sample

if TYPE_CHECKING:
    import torch

KEY = "fleetstart_request"
"""Key of vLLM's `extra_args` that names the row's request."""


@dataclass(slots=True)
class RequestSampler:
    """Sampler of one request. `before`: output tokens that it came with."""

    request: Request
    before: tuple[int, ...]
    state: SamplerState
    drawn: int = 0

    @classmethod
    def of(cls, request: Request, outputs: list[int]) -> RequestSampler:
        return cls(request, tuple(outputs), _state(request, outputs))

    def after(self, outputs: list[int]) -> SamplerState:
        """The state after these tokens of vLLM's. A draw that vLLM discarded, as of a prompt's part, did not happen."""
        if len(outputs) != self.drawn:
            self.state = _state(self.request, [*self.before, *outputs])
            self.drawn = len(outputs)
        self.drawn += 1
        return self.state


def is_plain(request: Request) -> bool:
    """Checks whether the request takes the largest logit each time, which vLLM does by itself."""
    sampling = request.sampling
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    return sampling.greedy and not penalised and not sampling.logit_bias and request.constraint is None


def processor_class(samplers: Mapping[int, RequestSampler]) -> type[Any]:
    """The class of vLLM's processor for the rows of these requests. vLLM makes the instance."""
    from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

    class FleetstartSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is typed where it is installed
        """Sampling of a batch's rows. `rows`: request and output tokens of each row that is sampled here."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.rows: dict[int, tuple[int, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for row in batch_update.removed:
                self.rows.pop(row, None)
            for row, params, _, outputs in batch_update.added:
                self.rows.pop(row, None)
                if params.extra_args and KEY in params.extra_args:
                    self.rows[row] = (params.extra_args[KEY], outputs)
            for begin, end, direction in batch_update.moved:
                moving, replaced = self.rows.pop(begin, None), self.rows.pop(end, None)
                if moving is not None:
                    self.rows[end] = moving
                if replaced is not None and direction == MoveDirectionality.SWAP:
                    self.rows[begin] = replaced

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            found = [(row, samplers.get(id), outputs) for row, (id, outputs) in sorted(self.rows.items())]
            chosen = [(row, one.after(outputs)) for row, one, outputs in found if one is not None]
            if chosen:
                rows = [row for row, _ in chosen]
                tokens = sample(logits[rows], [state for _, state in chosen])
                logits[rows] = float("-inf")
                logits[rows, tokens] = 0.0
            return logits

    return FleetstartSampling


def _state(request: Request, outputs: list[int]) -> SamplerState:
    return SamplerState.resumed(request.sampling, outputs, request.constraint)
