"""The independent other side: the protocol written down a second time, over pyverbs. Knows nothing of fleetstart.

    pyverbs_peer.py hold PORT BYTES CHUNK        serves a region of known content to one reader, then ends
    pyverbs_peer.py read HOST PORT BYTES CHUNK   reads the region, one chunk after the other, and checks it

Prints one line of JSON. Run by the Python that Debian's pyverbs is built for.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import struct
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

MAGIC = b"FS-RDMA1"
HELLO = struct.Struct("<8sIIIHBB16sII")
PART = struct.Struct("<QQQII")
MESSAGE = struct.Struct("<IIQQQ")
BEAT, CONNECTED, ASK, READY = 1, 2, 3, 4
SILENCE_MS = 30_000
FIRST_PACKET = 4711
WAIT_S = 60.0


def content(chunk: int, chunk_bytes: int) -> bytes:
    cycle = bytes(range(251))
    begin = chunk * 37 % 251
    return (cycle * (chunk_bytes // 251 + 2))[begin : begin + chunk_bytes]


class Peer:
    """A region of shared memory, registered, and a queue pair."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes)  # shared and anonymous
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.context = Context(name=get_device_list()[0].name.decode())
        self.domain = PD(self.context)
        self.completions = CQ(self.context, 64)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        self.registered = MR(self.domain, size_bytes, access, address=self.address)
        capacity = QPCap(max_send_wr=16, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=capacity)
        self.pair = QP(self.domain, wanted, QPAttr())
        entries = self.context.query_gid_table(64)
        self.gid_index, self.gid = next(
            (entry.gid_index, entry.gid_str())
            for entry in entries
            if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and ":ffff:" in entry.gid_str()
        )

    def hello(self, part_count: int) -> bytes:
        gid = bytes.fromhex(self.gid.replace(":", ""))
        mtu = self.context.query_port(1).active_mtu
        number = self.pair.qp_num
        return HELLO.pack(MAGIC, 1, number, FIRST_PACKET, 0, mtu, 1, gid, part_count, SILENCE_MS)

    def connect(self, hello: bytes) -> int:
        """Sets the pair up towards the sender of that hello; returns the number of its parts."""
        magic, version, number, first_packet, _, mtu, _, gid, part_count, _ = HELLO.unpack(hello)
        assert (magic, version) == (MAGIC, 1), hello
        attributes = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=1)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
        self.pair.to_init(attributes)
        attributes = QPAttr(port_num=1)
        attributes.path_mtu = min(mtu, self.context.query_port(1).active_mtu)
        attributes.dest_qp_num, attributes.rq_psn = number, first_packet
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 16, 12
        words = gid.hex()
        text = ":".join(words[i : i + 4] for i in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(text), sgid_index=self.gid_index)
        route.hop_limit = 64
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 19, 7, 7
        attributes.max_rd_atomic, attributes.sq_psn = 16, FIRST_PACKET
        self.pair.to_rtr(attributes)
        self.pair.to_rts(attributes)
        return int(part_count)

    def read(self, offset: int, size_bytes: int, remote: int, rkey: int) -> None:
        request = SendWR(
            wr_id=offset, opcode=e.IBV_WR_RDMA_READ, send_flags=e.IBV_SEND_SIGNALED, num_sge=1,
            sg=[SGE(self.address + offset, size_bytes, self.registered.lkey)],
        )  # fmt: skip
        request.set_wr_rdma(rkey, remote)
        self.pair.post_send(request)
        until_s = time.monotonic() + WAIT_S
        while not (found := self.completions.poll(1)[1]):
            assert time.monotonic() < until_s, "no completion"
            time.sleep(0.001)
        assert found[0].status == e.IBV_WC_SUCCESS, found[0].status


def receive(sock: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = sock.recv(size_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def message(sock: socket.socket) -> tuple[int, int, int, int, int]:
    """The next one that is no beat."""
    while True:
        found: tuple[int, int, int, int, int] = MESSAGE.unpack(receive(sock, MESSAGE.size))
        if found[0] != BEAT:
            return found


def hold(port: int, size_bytes: int, chunk_bytes: int) -> dict[str, object]:
    peer = Peer(size_bytes)
    for chunk in range(size_bytes // chunk_bytes):
        peer.memory[chunk * chunk_bytes : (chunk + 1) * chunk_bytes] = content(chunk, chunk_bytes)
    listener = socket.create_server(("", port))
    listener.settimeout(WAIT_S)
    sock = listener.accept()[0]
    sock.settimeout(WAIT_S)
    half = size_bytes // 2  # two parts of one registration: a reader must not need them to be apart
    sock.sendall(peer.hello(2))
    for offset in (0, half):
        sock.sendall(PART.pack(offset, half, peer.address + offset, peer.registered.rkey, 0))
    peer.connect(receive(sock, HELLO.size))
    sock.sendall(MESSAGE.pack(CONNECTED, 0, 0, 0, 0))
    assert message(sock)[0] == CONNECTED
    answered = 0
    try:
        while True:
            kind, _, request, offset, length = message(sock)
            assert kind == ASK, kind
            sock.sendall(MESSAGE.pack(READY, 0, request, offset, length))
            answered += 1
    except (EOFError, ConnectionResetError):
        return {"answered": answered}


def read(host: str, port: int, size_bytes: int, chunk_bytes: int) -> dict[str, object]:
    peer = Peer(size_bytes)
    sock = socket.create_connection((host, port), timeout=WAIT_S)
    sock.sendall(peer.hello(0))
    count = peer.connect(receive(sock, HELLO.size))
    parts = [PART.unpack(receive(sock, PART.size)) for _ in range(count)]
    sock.sendall(MESSAGE.pack(CONNECTED, 0, 0, 0, 0))
    assert message(sock)[0] == CONNECTED
    wrong = []
    for chunk in range(size_bytes // chunk_bytes):
        offset = chunk * chunk_bytes
        sock.sendall(MESSAGE.pack(ASK, int(WAIT_S * 1000), chunk, offset, chunk_bytes))
        kind, _, request, *_ = message(sock)
        assert (kind, request) == (READY, chunk), (kind, request)
        begin, _, address, rkey, _ = next(part for part in parts if part[0] <= offset < part[0] + part[1])
        peer.read(offset, chunk_bytes, address + offset - begin, rkey)
        if peer.memory[offset : offset + chunk_bytes] != content(chunk, chunk_bytes):
            wrong.append(chunk)
    return {"parts": count, "wrong": wrong, "chunks": size_bytes // chunk_bytes}


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "hold":
        print(json.dumps(hold(*map(int, rest))), flush=True)
    else:
        print(json.dumps(read(rest[0], *map(int, rest[1:]))), flush=True)
