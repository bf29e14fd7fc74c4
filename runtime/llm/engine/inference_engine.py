"""Interface of the engines that run language models: requests of token ids in, deltas out.

An engine is synchronous and runs in one thread, which `engine_service` owns: that makes asynchronous streams of its
deltas, and cancels what no client reads any more. Prompts, chat templates, tools and the HTTP contract are the
server's, so an engine computes tokens and nothing else. Tokens are the state: a request of another worker, or of
another engine, resumes with the tokens that it has (`Request.resume`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...contract.errors import FleetError
from .generation import Request, ResumeState, TokenDelta


def never() -> bool:
    """Default of `InferenceEngine.step`: nothing waits."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests and KV blocks of an engine at one moment."""

    active: int
    """Requests that have not ended, wherever their tokens are computed."""
    migrated_in: int = 0
    """Requests of another worker that are computed here."""
    prompt_tokens: int = 0
    """Tokens of all prompts that were begun."""
    cached_tokens: int = 0
    """Those of them whose keys and values were there before."""
    free_blocks: int
    block_count: int


class InferenceEngine(Protocol):
    """Engine of one loaded model. Not thread-safe, except `check`, `resume`, `context_tokens` and `load`.

    `generation.start_generation` and `Generation.accept` make text, stops and deltas of an engine's tokens, so that
    every engine ends a request alike.
    """

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Present load; from any thread, where it may be one step old."""
        ...

    @property
    def idle(self) -> bool:
        """Checks whether there is nothing to compute until a request is added."""
        ...

    @property
    def stalled(self) -> bool:
        """Checks whether no step can run now, though requests wait."""
        ...

    @property
    def stages(self) -> int:
        """Number of workers that compute a step one after the other: 1 without a pipeline."""
        ...

    def check(self, request: Request) -> None:
        """Checks a request. Errors: InvalidInput if it can never be finished here."""
        ...

    def resume(self, request: Request, tokens: list[int]) -> ResumeState:
        """State to resume a request after tokens of another worker. Errors: as of `generation.resume_state`."""
        ...

    def add(self, request: Request, id: int | None = None) -> int:
        """Adds a request; returns the id that its deltas carry, a fresh one for None.

        A request with `logprobs`, `constraint` or `resume` gets what it asks for. Errors: InvalidInput, as `check`.
        """
        ...

    def cancel(self, id: int) -> None:
        """Cancels a request and frees what it holds; ignores a finished or unknown id."""
        ...

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        """Computes some tokens; returns their deltas, and errors of requests whose deadline has passed (`now_ns`,
        monotonic). Never raises for one request's sake: a delta has its error. `awaited` tells whether a request or
        another command waits for the end of the step: then no further one is begun before it."""
        ...

    def fail_all(self, error: FleetError) -> list[TokenDelta]:
        """Ends every request with the error, when the worker ends."""
        ...

    def release(self) -> list[TokenDelta]:
        """Frees weights and KV memory (standby); returns the deltas of a step that was under way. Unfinished requests
        wait, and are recomputed from their tokens after `regain`. Does nothing if they are released."""
        ...

    def regain(self) -> None:
        """Takes weights and KV memory again; blocks until it can step. Does nothing if nothing is released. Errors:
        those of loading."""
        ...

    def close(self) -> None:
        """Ends what the engine has started, after its last step: processes, threads, devices."""
        ...
