"""The stream for volumes: files arrive as they were sent, and a hostile sender writes nothing outside the folder."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import FleetError, InvalidInput
from fleetstart.runtime.contract.function.layer import FILES_MAX, LAYER_MAX_BYTES, LayerFile
from fleetstart.runtime.contract.function.tree import list_files
from fleetstart.runtime.contract.node.volume_stream import (
    Abort,
    Commit,
    End,
    FileHead,
    StreamClosed,
    TransferAborted,
    VolumeStream,
    check_announced,
    discard_files,
    receive_files,
    send_files,
)

Pair = tuple[VolumeStream, VolumeStream]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    yield VolumeStream(one), VolumeStream(two)
    one.close()
    two.close()


def sending(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def hostile(pair: Pair, folder: Path, *messages: object, files: int = 3, size_bytes: int = 10) -> Exception:
    """The error with which what was sent is refused."""
    for message in messages:
        pair[0].send_data(message) if isinstance(message, bytes) else pair[0].send(message)  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    with pytest.raises((FleetError, StreamClosed, OSError)) as caught:
        receive_files(pair[1], folder, files, size_bytes)
    return caught.value


@given(contents=st.dictionaries(st.sampled_from(["a", "b/c", "b/d/e", "f.txt"]), st.binary(max_size=5000)))
def test_files_arrive_as_they_were_sent(contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    one, two = map(VolumeStream, socket.socketpair())
    files = list_files(source)
    thread = sending(lambda: send_files(one, source, files))
    assert receive_files(two, target, len(files), sum(map(len, contents.values()))) == files
    thread.join()
    assert {file.path: (target / file.path).read_bytes() for file in files} == contents
    one.close()
    two.close()


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a\0b", "a\nb", "x" * 2000])
def test_a_path_that_leads_out_is_refused(pair: Pair, tmp_path: Path, path: str) -> None:
    assert isinstance(hostile(pair, tmp_path / "in", FileHead(path, 1), b"x"), FleetError)
    assert [found.name for found in tmp_path.rglob("*")] == ["in"]


@pytest.mark.parametrize(("former", "then"), [("a", "a"), ("b", "a"), ("a", "a/b")])
def test_a_file_twice_out_of_order_or_below_a_file_is_refused(
    pair: Pair, tmp_path: Path, former: str, then: str
) -> None:
    error = hostile(pair, tmp_path, FileHead(former, 1), b"x", FileHead(then, 1), b"y")
    assert isinstance(error, InvalidInput)


def test_more_than_was_announced_is_refused(pair: Pair, tmp_path: Path) -> None:
    assert "more came" in str(hostile(pair, tmp_path / "one", FileHead("a", 11)))
    heads = [message for name in "abcd" for message in (FileHead(name, 0),)]
    assert "more came" in str(hostile(pair, tmp_path / "two", *heads))
    assert isinstance(hostile(pair, tmp_path / "three", FileHead("a", -5)), InvalidInput)


def test_more_bytes_than_the_files_size_end_the_stream(pair: Pair, tmp_path: Path) -> None:
    assert isinstance(hostile(pair, tmp_path, FileHead("a", 2), b"xyz"), StreamClosed)


@pytest.mark.parametrize("data", [b"m\xff\xff\xff\xff", b"d\xff\xff\xff\xff", b"x\0\0\0\1a", b"m\0\0\0\2{}", b"m\0"])
def test_frames_that_are_none_end_the_stream(pair: Pair, data: bytes) -> None:
    pair[0].socket.sendall(data)
    pair[0].socket.shutdown(socket.SHUT_WR)
    with pytest.raises(StreamClosed):
        pair[1].receive()


def test_a_sender_that_ends_in_the_middle_is_noticed(pair: Pair, tmp_path: Path) -> None:
    pair[0].send(FileHead("a", 5))
    pair[0].send_data(b"ab")
    pair[0].close()
    with pytest.raises(StreamClosed):
        receive_files(pair[1], tmp_path, 1, 5)


def test_a_file_that_becomes_shorter_gives_the_transfer_up(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(InvalidInput, match="2 bytes shorter"):
        send_files(pair[0], tmp_path, [LayerFile("a", 5)])
    (tmp_path / "target").mkdir()
    with pytest.raises(TransferAborted):
        receive_files(pair[1], tmp_path / "target", 1, 5)


def test_a_receiver_that_has_answered_stops_the_sender(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(100))
    pair[1].send(End())
    assert pair[0].answered()
    send_files(pair[0], tmp_path, [LayerFile("a", 100)], pair[0].answered)
    assert isinstance(pair[1].receive(), Abort)


def test_what_a_refused_sender_still_sends_is_dropped_and_bounded(pair: Pair) -> None:
    for _ in range(3):
        pair[0].send_data(b"x" * 1000)
    pair[0].send(End())
    pair[0].send(Commit("index", 1, 1))
    discard_files(pair[1], 10_000)
    assert pair[1].receive() == Commit("index", 1, 1)
    pair[0].send_data(b"x" * 1000)
    with pytest.raises(StreamClosed, match="goes on"):
        discard_files(pair[1], 100)


@pytest.mark.parametrize(("files", "size_bytes"), [(-1, 0), (0, -1), (FILES_MAX + 1, 0), (1, LAYER_MAX_BYTES + 1)])
def test_too_many_files_or_bytes_are_refused_before_they_come(files: int, size_bytes: int) -> None:
    with pytest.raises(FleetError):
        check_announced(files, size_bytes)
