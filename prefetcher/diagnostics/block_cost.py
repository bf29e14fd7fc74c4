"""`python -m fleetstart.prefetcher.diagnostics.block_cost`: measures what one block of a multicast costs beside its
bytes; prints JSON.

The same bytes go from one memory to another over loopback, by the transport between peers, in few blocks and in many,
each asked for when the last one is there. What a network adds to a round trip is not in it.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from statistics import median

import msgspec

from fleetstart import native
from fleetstart.runtime.contract.node.throughput import BlockTimes
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES

SIZE_BYTES = 128 * MIB
"""Enough that the largest blocks take a tenth of a second together."""
BLOCKS = (32, 128, 512, 2048)
"""The fewest are whole chunks."""
ROUNDS = 3
ANSWER_S = 30.0
LATER_UNIX_MS = 10**15


def measure(size_bytes: int = SIZE_BYTES, rounds: int = ROUNDS) -> BlockTimes:
    """Median seconds of a transfer by number of blocks. Errors: OSError, native.NativeError."""
    chunks = size_bytes // CHUNK_BYTES
    pool = native.SlabPool("fleetstart-doctor", pages="small", slab_bytes=CHUNK_BYTES, capacity=2 * chunks)
    held, filled = pool.take(size_bytes), pool.take(size_bytes)
    control = native.ControlBlock.create("fleetstart-doctor", chunks, b"", 1)
    for chunk in range(chunks):
        held.populate(chunk * CHUNK_BYTES, CHUNK_BYTES)
        filled.populate(chunk * CHUNK_BYTES, CHUNK_BYTES)
        control.mark_ready(chunk)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        server = native.TcpServer(theirs.fileno(), held, control, CHUNK_BYTES, [(0, chunks)])
        reader = native.TcpReader(ours.fileno(), filled)
    thread = threading.Thread(target=server.run, args=(LATER_UNIX_MS,), name="doctor-blocks", daemon=True)
    thread.start()
    try:
        counts = [count for count in BLOCKS if count >= chunks]
        seconds = {count: [_transfer_s(reader, size_bytes, count) for _ in range(rounds)] for count in counts}
    finally:
        server.stop()
        thread.join(ANSWER_S)
    return BlockTimes(size_bytes=size_bytes, seconds={count: median(found) for count, found in seconds.items()})


def _transfer_s(reader: native.TcpReader, size_bytes: int, blocks: int) -> float:
    block_bytes = size_bytes // blocks
    began_s = time.monotonic()
    for block in range(blocks):
        reader.submit(block, block * block_bytes, block_bytes, ANSWER_S)
        done = reader.poll(ANSWER_S)
        if not done or done[0].status != "ok":
            raise OSError(f"block {block} of {blocks} did not come: {reader.error or 'no answer'}")
    return time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description="What a block of a multicast costs on this machine, as JSON.")
    parser.add_argument("--bytes", type=int, default=SIZE_BYTES, help="how much is moved, for quick tests")
    try:
        found = measure(parser.parse_args().bytes)
    except (OSError, native.NativeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
