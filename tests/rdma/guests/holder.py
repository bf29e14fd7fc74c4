"""The holder's guest: runs holders of a region as the reader's guest commands, each in a process of its own.

A command is a line of JSON over TCP, and so is its answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from fleetstart.native._rdma import RdmaServer
from tests.rdma.bed import DEBIAN_PYTHON, PYVERBS
from tests.rdma.guests import region as shared
from tests.rdma.guests import whole_nodes
from tests.rdma.guests.loss import set_loss

EVER_MS = 10_000_000_000_000
PEER = "tests/rdma/guests/pyverbs_peer.py"
SLOW_STEP_S = 0.005
SILENCE_S = 30.0


def hold_rdma(port: int, ready: int, brings: bool, allowed: int, silence_s: float, outcome: int) -> None:
    """Serves one reader. `ready` chunks are there; if it `brings` the others, they come one by one. Writes its end."""
    region, memory = shared.new_region(*shared.new_pool())
    shared.fill(region)
    control = shared.new_control(range(ready))
    with socket.create_server(("", port)) as listener:
        os.write(outcome, b"listening\n")
        sock = listener.accept()[0]

    def bring() -> None:
        for chunk in range(ready, shared.CHUNKS):
            time.sleep(SLOW_STEP_S)
            control.mark_ready(chunk)

    server = RdmaServer(
        sock.fileno(), memory, control, shared.CHUNK_BYTES, [(0, allowed)], connect_s=30, silence_s=silence_s
    )
    if brings:
        threading.Thread(target=bring, daemon=True).start()
    try:
        reason = server.run(EVER_MS)
    except Exception as error:
        reason = repr(error)
    os.write(outcome, f"{reason}\n".encode())


def hold_two(ports: list[int], connect_s: float, until_unix_ms: int, outcome: int) -> None:
    """Serves a reader of each of two segments of one pool, which have the same content. Writes how they ended."""
    pool, rdma = shared.new_pool()
    memories = [shared.new_region(pool, rdma) for _ in ports]
    listeners = [socket.create_server(("", port)) for port in ports]
    os.write(outcome, b"listening\n")
    reasons = ["", ""]

    def serve(index: int) -> None:
        region, memory = memories[index]
        shared.fill(region)
        control = shared.new_control(range(shared.CHUNKS))
        sock = listeners[index].accept()[0]
        allowed = [(0, shared.CHUNKS)]
        server = RdmaServer(
            sock.fileno(), memory, control, shared.CHUNK_BYTES, allowed, connect_s=connect_s, silence_s=SILENCE_S
        )
        try:
            reasons[index] = server.run(until_unix_ms or EVER_MS)
        except Exception as error:
            reasons[index] = f"{type(error).__name__}: {error}"
        sock.close()

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(outcome, f"{' | '.join(reasons)}\n".encode())


class Holders:
    """Processes that hold a region."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Any] = {}
        self._peer: subprocess.Popen[str] | None = None

    def hold(self, **options: Any) -> dict[str, Any]:
        return self._fork(lambda outcome: hold_rdma(outcome=outcome, **options))

    def hold_two(self, **options: Any) -> dict[str, Any]:
        return self._fork(lambda outcome: hold_two(outcome=outcome, **options))

    def hold_node(self, **options: Any) -> dict[str, Any]:
        started = self._fork(lambda outcome: whole_nodes.hold(outcome=outcome, **options))
        return {**started, **json.loads(self._outcomes[started["pid"]].readline())}

    def lose(self, percent: float) -> dict[str, Any]:
        """Loses so many of a hundred packets that this guest sends; how many it has lost."""
        return {"lost": set_loss(percent)}

    def signal(self, pid: int, name: str) -> dict[str, Any]:
        os.kill(pid, signal.Signals[name])
        return {}

    def outcome(self, pid: int) -> dict[str, Any]:
        """Waits for the end."""
        reason = self._outcomes.pop(pid).readline().strip()
        os.waitpid(pid, 0)
        return {"reason": reason}

    def pyverbs(self, arguments: list[str]) -> dict[str, Any]:
        self._peer = subprocess.Popen(
            [DEBIAN_PYTHON, PEER, *arguments], stdout=subprocess.PIPE, text=True, env=pyverbs_environment()
        )
        return {}

    def pyverbs_outcome(self) -> dict[str, Any]:
        assert self._peer is not None
        output, _ = self._peer.communicate(timeout=60)
        return json.loads(output)  # type: ignore[no-any-return]

    def _fork(self, work: Callable[[int], None]) -> dict[str, Any]:
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reads)
                work(writes)
                status = 0
            finally:
                os._exit(status)
        os.close(writes)
        outcome = os.fdopen(reads)
        assert outcome.readline().strip() == "listening"
        self._outcomes[pid] = outcome
        return {"pid": pid}


def pyverbs_environment() -> dict[str, str]:
    """For the Python of Debian: its pyverbs is unpacked, not installed."""
    libraries = f"{PYVERBS}/usr/lib/x86_64-linux-gnu:{PYVERBS}/lib/x86_64-linux-gnu"
    return {"PYTHONPATH": f"{PYVERBS}/usr/lib/python3/dist-packages", "LD_LIBRARY_PATH": libraries}


def main() -> None:
    holders = Holders()
    listener = socket.create_server(("", shared.COMMANDS_PORT))
    with listener.accept()[0].makefile("rw") as commands:
        for line in commands:
            command = json.loads(line)
            try:
                answer = getattr(holders, command.pop("verb"))(**command)
            except Exception:
                answer = {"failed": traceback.format_exc()}
            commands.write(json.dumps(answer) + "\n")
            commands.flush()


if __name__ == "__main__":
    main()
