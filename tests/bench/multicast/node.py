"""A node of the multicast benchmark: serves its blocks to others and executes its pulls, on word from standard input.

Its transport is the product's own, `TcpReader` and `TcpServer`; plans come from the benchmark, without controllers.
Each line is a command in JSON, answered by a line. Times are of the monotonic clock, which all processes of a machine
share.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

from fleetstart.native import ControlBlock, Region, SlabPool, TcpReader, TcpServer, xxh3
from fleetstart.prefetcher.fetch.pulls import WINDOW
from fleetstart.prefetcher.peers.links import prepare

WAIT_S = 300.0
"""How long holders wait for blocks: longer than any transfer takes."""
POLL_S = 1.0
LATER_MS = 10**15
OUTSTANDING_MOST = 64
"""Chunks asked of a peer at a time: what one connection takes, and what the four of a fetch ask for together."""


class Holder:
    """A region with its chunks, and the server that gives them to who connects."""

    def __init__(self, host: str, chunks: int, chunk_bytes: int, whole: bool) -> None:
        self.chunks, self.chunk_bytes = chunks, chunk_bytes
        self._pool = SlabPool("multicast", pages="small", slab_bytes=chunk_bytes, capacity=chunks)
        self.region: Region = self._pool.take(chunks * chunk_bytes)
        self.control = ControlBlock.create("multicast", chunks, b"", 1)
        self._servers: list[TcpServer] = []
        self._threads: list[threading.Thread] = []
        for chunk in range(chunks if whole else 0):
            view = self.region.view(chunk * chunk_bytes, chunk_bytes)
            view[:] = (chunk.to_bytes(4, "big") + b"weights.") * (chunk_bytes // 12) + bytes(chunk_bytes % 12)
            self.control.mark_ready(chunk)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def checksums(self) -> list[int]:
        size = self.chunk_bytes
        return [xxh3(self.region.view(chunk * size, size)) for chunk in range(self.chunks)]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for server in self._servers:
            server.stop()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Any) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                prepare(connection)
                allowed = [(0, self.chunks)]
                server = TcpServer(connection.fileno(), self.region, self.control, self.chunk_bytes, allowed, WAIT_S)
            self._servers.append(server)
            self._start(lambda server=server: server.run(LATER_MS))


class Puller:
    """The execution of one node's pulls in order, as a start executes them: so many are asked for at once."""

    def __init__(self, holder: Holder, peers: list[tuple[str, int]], pulls: list[tuple[int, int, int]]) -> None:
        self._holder = holder
        self._wanted = [(peer, chunk, n) for n, (peer, first, end) in enumerate(pulls) for chunk in range(first, end)]
        self._pull_of = {chunk: pull for _, chunk, pull in self._wanted}
        self._missing = [end - first for _, first, end in pulls]
        self._over = 0
        """Pulls that are over, and so are all before them."""
        self._lock = threading.Condition()
        self._asked = self._done = 0
        self.arrivals: list[tuple[int, float, int]] = []
        """Chunk, time, checksum."""
        self.failed = ""
        self._readers = []
        for address in peers:
            with socket.create_connection(address, 10) as connection:
                prepare(connection)
                self._readers.append(TcpReader(connection.fileno(), holder.region, WAIT_S))
        self._outstanding = [0] * len(self._readers)
        self._threads = [threading.Thread(target=self._poll, args=(n,), daemon=True) for n in range(len(self._readers))]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        with self._lock:
            self._ask()
            self._lock.wait_for(lambda: self._is_over, WAIT_S)
        for thread in self._threads:
            thread.join(10)

    @property
    def _is_over(self) -> bool:
        return bool(self.failed) or self._done == len(self._wanted)

    def _ask(self) -> None:
        while self._over < len(self._missing) and not self._missing[self._over]:
            self._over += 1
        while self._asked < len(self._wanted) and self._wanted[self._asked][2] < self._over + WINDOW:
            peer, chunk, _ = self._wanted[self._asked]
            if self._outstanding[peer] == OUTSTANDING_MOST:
                break
            size = self._holder.chunk_bytes
            self._readers[peer].submit(chunk, chunk * size, size, WAIT_S)
            self._outstanding[peer] += 1
            self._asked += 1
        self._lock.notify_all()

    def _poll(self, peer: int) -> None:
        reader = self._readers[peer]
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._outstanding[peer] > 0 or self._is_over)
                if self._is_over:
                    return
            found = reader.poll(POLL_S)
            now_s = time.monotonic()
            with self._lock:
                for one in found:
                    if one.status != "ok":
                        self.failed = f"chunk {one.request}: {one.status}, {reader.error}"
                        continue
                    self._holder.control.mark_ready(one.request)
                    self.arrivals.append((one.request, now_s, one.checksum))
                    self._done += 1
                    self._missing[self._pull_of[one.request]] -= 1
                self._outstanding[peer] -= len(found)
                self._ask()


def main() -> None:
    holder: Holder | None = None
    puller: Puller | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "hold":
            holder = Holder(command["host"], command["chunks"], command["chunk_bytes"], command["whole"])
            answer = {"port": holder.port, "checksums": holder.checksums() if command["whole"] else []}
        elif command["do"] == "connect" and holder is not None:
            peers = [(host, port) for host, port in command["peers"]]
            puller = Puller(holder, peers, [(peer, first, end) for peer, first, end in command["pulls"]])
        elif command["do"] == "pull" and puller is not None:
            time.sleep(max(0.0, command["at_s"] - time.monotonic()))
            puller.run()
            answer = {"arrivals": puller.arrivals, "failed": puller.failed}
        elif command["do"] == "end" and holder is not None:
            puller = None
            holder.close()
            holder = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
