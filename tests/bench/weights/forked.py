"""Fork server for loaders: each load runs in a fresh process, forked from one that has imported torch and run nothing.

So each begins with memory of its own and nobody's imports are counted. Runs in every peer's Python: it needs torch
and the standard library alone. `measured` is the other end, in the benchmark.

Ready means every page touched: one byte of each 4 KiB of each tensor is added up, by the same code for all. The sums
must be equal; `digest` asks in addition for the sha256 of all bytes, after the time is taken.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

PAGE = 4096
Load = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Prepare = Callable[[Any], Load]
"""Imports the library and gives what is timed. Tensors may come one by one; all are kept until the end."""
Action = Callable[[Any], Any]
"""Something else to do in a process of its own: question in, answer out."""


def serve(about: dict[str, Any], loaders: dict[str, Prepare], actions: dict[str, Action] | None = None) -> None:
    """Answers questions until its input ends, each in a child of its own."""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print where they like; answers have their own descriptor
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as fork servers do: or a child's first collection would copy what it merely looks at
    _say(answers, about)
    while line := sys.stdin.readline():
        question = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                if question["do"] == "load":
                    _load(answers, loaders[question["loader"]], question)
                else:
                    _say(answers, (actions or {})[question["do"]](question))
            except BaseException as error:
                _say(answers, {"error": f"{type(error).__name__}: {error}"[:300]})
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            _say(answers, {"error": f"killed by signal {os.WTERMSIG(status)}"})


def _load(answers: int, prepare: Prepare, question: Any) -> None:
    torch.zeros(1, device=question.get("device", "cpu"))  # a GPU's context is nobody's load
    load = prepare(question)
    _say(answers, {"prepared": os.getpid()})
    sys.stdin.readline()
    kept: dict[str, torch.Tensor] = {}
    touched = 0
    before_s, began_s = cpu_s(), time.perf_counter()
    tensors = load()
    returned_s = time.perf_counter() - began_s
    for name, tensor in tensors:
        kept[name] = tensor
        touched += touch(tensor)
    ready_s, used_s = time.perf_counter() - began_s, cpu_s() - before_s
    answer: dict[str, Any] = {"returned_s": returned_s, "ready_s": ready_s, "cpu_s": used_s}
    answer |= {"touched": touched, "tensors": len(kept)}
    if question.get("digest"):
        answer["digest"] = digest(kept)
    _say(answers, answer)


def touch(tensor: torch.Tensor) -> int:
    return int(_bytes_of(tensor)[::PAGE].sum(dtype=torch.int64))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(_bytes_of(tensors[name]).cpu().numpy().data)
    return whole.hexdigest()


def cpu_s() -> float:
    """CPU seconds of this process and of children it has waited for, in user and in kernel."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _say(answers: int, answer: Any) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]
