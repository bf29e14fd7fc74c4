"""Finds a checkpoint by its id, a prefix of its id, or the name of a function that uses it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.ids import CheckpointId

from ...schemas.functions import CheckpointInfo, FunctionInfo
from ..api_client import ApiClient

PREFIX_MIN = 4
SHORT = 12
"""Digits of an id in messages and tables: one in 10^14 pairs is equal."""

_HEX = re.compile(r"[0-9a-f]{1,64}")


def find_checkpoint(server: ApiClient, text: str, *, unfinished: bool = False) -> CheckpointInfo:
    """The checkpoint that a text names. Errors: NotFound with the nearest name; InvalidInput for several."""
    checkpoints = server.get("/api/v1/checkpoints", list[CheckpointInfo], unfinished=int(unfinished))
    functions = server.get("/api/v1/functions", list[FunctionInfo])
    return choose_checkpoint(text, checkpoints, functions)


def choose_checkpoint(
    text: str, checkpoints: Sequence[CheckpointInfo], functions: Sequence[FunctionInfo]
) -> CheckpointInfo:
    wanted = text.strip().lower()
    by_id = [info for info in checkpoints if _HEX.fullmatch(wanted) and info.id.startswith(wanted)]
    function = next((function for function in functions if function.name == text), None)
    if function is not None and by_id and function.spec.weights not in {info.id for info in by_id}:
        raise InvalidInput(
            f"{text!r} is a function, and a prefix of checkpoint {by_id[0].id[:SHORT]}",
            hint=f"write more of the id: {by_id[0].id[:SHORT]}",
        )
    if function is not None:
        return _of_function(function, checkpoints)
    if by_id and len(wanted) < PREFIX_MIN:
        raise InvalidInput(f"{text!r} is too short for an id", hint=f"write at least {PREFIX_MIN} digits")
    if len(by_id) > 1:
        alike = ", ".join(info.id[:SHORT] for info in by_id[:5])
        raise InvalidInput(f"{text!r} is a prefix of {len(by_id)} checkpoints: {alike}", hint="write more digits")
    if by_id:
        return by_id[0]
    raise NotFound(f"no checkpoint {text[:80]!r} is in the store", hint=_nearest(wanted, checkpoints, functions))


def _of_function(function: FunctionInfo, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo:
    weights: CheckpointId | None = function.spec.weights
    if weights is None:
        raise NotFound(f"function {function.name} has no weights", hint="`fs weights ls` lists what is in the store")
    found = next((info for info in checkpoints if info.id == weights), None)
    if found is None:
        raise NotFound(
            f"the weights of function {function.name}, {weights[:SHORT]}, are not in the store",
            hint="`fs deploy` sends them again",
        )
    return found


def _nearest(wanted: str, checkpoints: Sequence[CheckpointInfo], functions: Sequence[FunctionInfo]) -> str:
    from difflib import get_close_matches

    length = max(PREFIX_MIN, len(wanted))
    names = {info.id[:length]: info.id[:SHORT] for info in checkpoints}
    names.update((str(function.name), str(function.name)) for function in functions if function.spec.weights)
    near = get_close_matches(wanted, names, n=1)
    if near:
        return f"did you mean {names[near[0]]!r}?"
    return "`fs weights ls` lists all" if checkpoints else "the store is empty: fs weights push FOLDER"
