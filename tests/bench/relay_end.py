"""One end of a link, as a process on a host of the test bed: sends words of a given size, or tells how old each was.

Run by `relay`. All hosts are this machine, so its monotonic clock is the same at both ends.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

from fleetstart.prefetcher.stage_links.relay import Relays
from fleetstart.prefetcher.stage_links.relay_messages import RelayLink
from fleetstart.runtime.contract.ids import PipelineId
from tests.testbed.bed import BUCKET

LINK = RelayLink(pipeline=PipelineId("p-bench"), sender=0, receiver=1, secret="word")
STAMP = struct.Struct("<q")
PORT = 7700


def send(way: str, address: str, size_bytes: int, count: int, pause_s: float) -> None:
    relays = Relays(BUCKET)
    if way == "direct":
        link = socket.create_connection((address, PORT))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        link, ours = socket.socketpair()
        relays.send(LINK, ours, fail)
    rest = bytes(size_bytes - STAMP.size)
    for _ in range(count):
        time.sleep(pause_s)
        link.sendall(STAMP.pack(time.monotonic_ns()) + rest)
    link.close()
    relays.close()


def receive(way: str, address: str, size_bytes: int, count: int) -> None:
    """Prints the age of each word when its last byte was there, in milliseconds, as JSON."""
    relays = Relays(BUCKET)
    with socket.create_server((address, PORT), reuse_port=True) as listener:
        print("listening", flush=True)
        if way == "relay":
            relays.receive(LINK, lambda: socket.create_connection((address, PORT)), fail)
        link, _ = listener.accept()
        ages_ms = []
        with link:
            for _ in range(count):
                word = exactly(link, size_bytes)
                ages_ms.append((time.monotonic_ns() - STAMP.unpack_from(word)[0]) / 1e6)
            link.recv(1)  # its end: until then the relay has more to read
    relays.close()
    print(json.dumps(ages_ms), flush=True)


def exactly(link: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        more = link.recv(size_bytes - len(data))
        if not more:
            sys.exit(f"the link ended after {len(data)} bytes of a word")
        data += more
    return bytes(data)


def fail(why: str) -> None:
    print(f"the link failed: {why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    end, way, address, size_bytes, count, pause_s = sys.argv[1:]
    if end == "send":
        send(way, address, int(size_bytes), int(count), float(pause_s))
    else:
        receive(way, address, int(size_bytes), int(count))
