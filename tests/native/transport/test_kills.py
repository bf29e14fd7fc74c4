"""A process at either end of a peer's connection that is killed in the middle of a pull."""

from __future__ import annotations

from fleetstart.native import TcpReader
from tests.native.neighbours import PATIENCE_S, Start, hear, until
from tests.native.transport.peers import CHUNK, CONTENT, completions, content_of, region, serving, tcp_pair

SERVE = """
import sys
from tests.native.transport.peers import CHUNK, CHUNKS, CONTENT, LATER_MS, region
from fleetstart.native import ControlBlock, TcpServer
control = ControlBlock.create("peer", CHUNKS, b"", 1)
control.mark_ready(0)
server = TcpServer(int(sys.argv[1]), region(content=CONTENT), control, CHUNK, [(0, CHUNKS)])
print("serving")
print(server.run(LATER_MS))
"""

READ = """
import sys
from tests.native.transport.peers import CHUNK, completions, region
from fleetstart.native import TcpReader
reader = TcpReader(int(sys.argv[1]), region())
reader.submit(0, 0, CHUNK)
reader.submit(1, CHUNK, CHUNK, 100)
print(completions(reader, 1)[0].status)
completions(reader, 1)
"""


def test_a_reader_hears_at_once_that_the_holder_was_killed(start: Start) -> None:
    ours, theirs = tcp_pair()
    with theirs:
        child = start(SERVE, theirs.fileno())
    with ours:
        filled = region()
        reader = TcpReader(ours.fileno(), filled)
        reader.submit(0, 0, CHUNK)
        reader.submit(1, CHUNK, CHUNK, PATIENCE_S * 2)
        assert [(one.request, one.status) for one in completions(reader, 1)] == [(0, "ok")]
        child.kill()
        assert [(one.request, one.status) for one in completions(reader, 1)] == [(1, "failed")]
        assert content_of(filled, 0, CHUNK) == CONTENT[:CHUNK]


def test_a_holder_hears_at_once_that_the_reader_was_killed(start: Start) -> None:
    with serving(ready=[0]) as peer:
        child = start(READ, peer.socket.fileno())
        peer.socket.close()
        assert hear(child) == "ok"
        assert until(lambda: peer.server.sent_bytes == CHUNK)
        child.kill()
        assert peer.ended() == "closed"
