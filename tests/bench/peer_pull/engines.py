"""Ends of a pull by transfer engines that people use, in a Python of their own: Mooncake and NIXL, over TCP.

Run by `__main__`, never by hand. Each reads the whole range in one transfer, as its documentation does. Memory is
registered and touched before the clock starts. Neither verifies what it read.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import importlib.metadata
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

os.environ["UCX_TLS"] = "tcp"
POLL_S = 0.0005
"""Pause between two looks for the end of a transfer; the documentation's loop has none, and takes a whole core."""


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Memory:
    def __init__(self, size_bytes: int, filler: bytes) -> None:
        self.map = mmap.mmap(-1, size_bytes)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, 1 << 20):
            self.map[at : at + (1 << 20)] = filler * (1 << 20)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.size_bytes = size_bytes


class Engine(Protocol):
    def about(self) -> dict[str, Any]:
        """What the other end needs to read from this one."""
        ...

    def pull(self, other: dict[str, Any]) -> None: ...


class Mooncake:
    def __init__(self, memory: Memory, _: str) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found, unused-ignore]

        self.memory, self.engine = memory, TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not initialize")
        if self.engine.register_memory(memory.address, memory.size_bytes) != 0:
            raise RuntimeError("Mooncake does not register")

    def about(self) -> dict[str, Any]:
        return {"segment": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.memory.address}

    def pull(self, other: dict[str, Any]) -> None:
        size = self.memory.size_bytes
        if self.engine.transfer_sync_read(other["segment"], self.memory.address, other["address"], size) != 0:
            raise RuntimeError("Mooncake did not read")


class Nixl:
    def __init__(self, memory: Memory, role: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, unused-ignore]

        self.memory = memory
        self.agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        self.ours = [(memory.address, memory.size_bytes, 0)]
        self.agent.register_memory([(memory.address, memory.size_bytes, 0, "")], "DRAM")
        self.known = ""

    def about(self) -> dict[str, Any]:
        return {
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "address": self.memory.address,
        }

    def pull(self, other: dict[str, Any]) -> None:
        if not self.known:
            self.known = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))
        ours = self.agent.get_xfer_descs(self.ours, "DRAM")
        theirs = self.agent.get_xfer_descs([(other["address"], self.memory.size_bytes, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", ours, theirs, self.known)
        state = self.agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            time.sleep(POLL_S)
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError("NIXL did not read")


ENGINES: dict[str, tuple[Callable[[Memory, str], Engine], str]] = {
    "mooncake": (Mooncake, "mooncake-transfer-engine-non-cuda"),
    "nixl": (Nixl, "nixl-cu12"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--temp-dir", "--which", "--role"):
        parser.add_argument(name)
    parser.add_argument("--size-bytes", type=int)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engines print is no answer
    kind, package = ENGINES[given.which]
    memory = Memory(given.size_bytes, b"\x01" if given.role == "serve" else b"\x02")
    try:
        engine: Engine = kind(memory, given.role)
        about = {**engine.about(), "version": importlib.metadata.version(package)}
    except Exception as error:  # its own kinds; told, not judged
        about = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        cpu, began = cpu_s(), time.perf_counter()
        if question["pull"]:
            engine.pull(question["pull"])
        ready_s = time.perf_counter() - began
        used_s = cpu_s() - (cpu if question["pull"] else 0.0)
        right = given.role == "serve" or memory.map[:: 1 << 16] == b"\x01" * (memory.size_bytes >> 16)
        print(json.dumps({"ready_s": ready_s, "cpu_s": used_s, "right": right}), file=answers)
    os._exit(0)  # their threads do not always end


if __name__ == "__main__":
    main()
