"""Named adapters of a language model: which names a request may choose one by, and what excludes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidSpec
from ..ids import CheckpointId, FunctionName
from .names import means

if TYPE_CHECKING:
    from .spec import LLMSettings

ADAPTERS_MAX = 16
"""A worker attaches all of them, and its KV memory is divided among them."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})")


def check_adapters(
    function: FunctionName,
    adapters: Mapping[str, CheckpointId],
    llm: LLMSettings | None,
    weights: CheckpointId | None,
    adapter: CheckpointId | None,
) -> None:
    """Checks the named adapters of a function. `adapter`: the one that every request gets.

    Errors: InvalidSpec, naming the adapter.
    """
    if llm is None:
        raise InvalidSpec(
            f"function {function}: adapters are chosen by a request's model, and this is no LLM",
            hint='write adapter="./lora": it is applied to the weights that load() gets',
        )
    if adapter is not None:
        raise InvalidSpec(
            f"function {function}: adapter is applied to every request, and adapters to those that name one",
            hint="name all of them in adapters",
        )
    if llm.tensor_parallel_size > 1:
        raise InvalidSpec(
            f"function {function}: a model that is split over devices has no named adapters",
            hint="leave out tensor_parallel_size, or deploy a function for each adapter",
        )
    if len(adapters) > ADAPTERS_MAX:
        raise InvalidSpec(f"function {function}: adapters has {ADAPTERS_MAX} at most, got {len(adapters)}")
    seen = {weights: "weights"}
    for name, checkpoint in adapters.items():
        if not _NAME.fullmatch(name) or means(name, function):
            raise InvalidSpec(
                f"function {function}: an adapter cannot be named {name[:80]!r}",
                hint="use 1 to 63 of A-Z, a-z, 0-9, '.', '_' and '-', and not the function's own name: "
                "that is the model without an adapter",
            )
        if checkpoint in seen:
            raise InvalidSpec(f"function {function}: {seen[checkpoint]} and adapter {name} are one checkpoint")
        seen[checkpoint] = f"adapter {name}"
