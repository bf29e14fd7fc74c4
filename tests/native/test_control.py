"""Control blocks: what is published, who may write, and that a broken one is an error and nothing worse."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.native import ControlBlock, NativeError, SegmentFailed
from tests.native.neighbours import PATIENCE_S, SEALS, attached, memory_with, open_descriptors, owned

PAGE = mmap.PAGESIZE


def content_of(block: ControlBlock) -> bytes:
    return os.pread(block.fd, os.fstat(block.fd).st_size, 0)


# ── what it says ───────────────────────────────────────────────────────────────────────────────────


def test_a_new_block_is_filling_and_says_what_it_was_given() -> None:
    owner = ControlBlock.create("new", 130, b"the manifest", 2**64 - 1)
    for block in (owner, attached(owner)):
        assert (block.manifest, block.generation, block.chunk_count) == (b"the manifest", 2**64 - 1, 130)
        assert (block.state, block.ready_count, block.error) == ("filling", 0, None)
        assert not any(block.is_ready(chunk) for chunk in range(130))


@given(st.integers(1, 300).flatmap(lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1)))))
def test_readers_see_exactly_the_chunks_that_were_marked_each_counted_once(case: tuple[int, list[int]]) -> None:
    count, marks = case
    owner = ControlBlock.create("marks", count, b"", 0)
    reader = attached(owner)
    seen: set[int] = set()
    for chunk in marks:
        assert owner.mark_ready(chunk) == (chunk not in seen)
        seen.add(chunk)
        assert reader.ready_count == len(seen)
    assert {chunk for chunk in range(count) if reader.is_ready(chunk)} == seen
    assert reader.state == ("ready" if len(seen) == count else "filling")


@given(st.integers(1, 200), st.data())
def test_a_range_is_ready_when_each_of_its_chunks_is(count: int, data: st.DataObject) -> None:
    ready = data.draw(st.sets(st.integers(0, count - 1)))
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    owner = ControlBlock.create("ranges", count, b"", 0)
    for chunk in ready | set(data.draw(st.sampled_from([(), range(first, last + 1)]))):
        owner.mark_ready(chunk)
        ready.add(chunk)
    if ready >= set(range(first, last + 1)):
        attached(owner).wait(first, last, 0)
    else:
        with pytest.raises(TimeoutError, match=f"{len(ready)} of {count} chunks are"):
            attached(owner).wait(first, last, 0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 1000])
def test_the_last_chunk_makes_it_ready(count: int) -> None:
    owner = ControlBlock.create("last", count, b"m", 0)
    for chunk in reversed(range(count)):
        assert owner.state == "filling"
        owner.mark_ready(chunk)
    assert (owner.state, owner.ready_count) == ("ready", count)
    attached(owner).wait(0, count - 1, 0)


def test_a_segment_without_chunks_is_ready_from_the_start() -> None:
    owner = ControlBlock.create("none", 0, b"manifest", 0)
    assert (owner.state, attached(owner).manifest) == ("ready", b"manifest")
    with pytest.raises(IndexError):
        owner.wait(0, 0, 0)


@pytest.mark.slow
@given(st.binary(max_size=5000))
def test_the_manifest_comes_back_as_it_was(manifest: bytes) -> None:
    assert attached(ControlBlock.create("manifest", 77, manifest, 1)).manifest == manifest


# ── failing ────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_reaches_readers_with_its_reason_and_is_final() -> None:
    owner = ControlBlock.create("failed", 3, b"", 0)
    reader = attached(owner)
    owner.mark_ready(0)
    assert owner.fail("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb")
    assert not owner.fail("other", "a later reason")
    assert (reader.state, reader.error) == ("failed", ("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb"))
    with pytest.raises(SegmentFailed) as raised:
        reader.wait(0, 1, 60)
    assert raised.value.args == ("checksum_mismatch", "chunk 1 of llama: wanted aa, got bb")
    assert isinstance(raised.value, NativeError)
    reader.wait(0, 0, 0)  # verified is verified
    owner.mark_ready(1)
    owner.mark_ready(2)
    assert reader.state == "failed"


def test_what_is_ready_does_not_fail_any_more() -> None:
    owner = ControlBlock.create("done", 1, b"", 0)
    owner.mark_ready(0)
    assert not owner.fail("late", "too late")
    assert (owner.state, owner.error) == ("ready", None)


@given(st.text(max_size=100), st.text(max_size=3000))
def test_reasons_are_cut_to_whole_characters(code: str, message: str) -> None:
    owner = ControlBlock.create("texts", 1, b"", 0)
    owner.fail(code, message)
    error = attached(owner).error
    assert error is not None
    assert code.startswith(error[0])
    assert message.startswith(error[1])
    assert len(error[0].encode()) > min(len(code.encode()), 64) - 4
    assert len(error[1].encode()) > min(len(message.encode()), 2048) - 4


# ── only the owner writes ──────────────────────────────────────────────────────────────────────────


def test_a_reader_cannot_write() -> None:
    owner = ControlBlock.create("mine", 2, b"", 0)
    reader = attached(owner)
    with pytest.raises(NativeError, match="only the owner"):
        reader.mark_ready(0)
    with pytest.raises(NativeError, match="only the owner"):
        reader.fail("code", "message")
    with pytest.raises(PermissionError):
        mmap.mmap(reader.fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(reader.fd, b"\xff", PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(reader.fd, 0)
    assert (owner.state, owner.ready_count) == ("filling", 0)


@pytest.mark.parametrize("chunk", [2, 63, 64, 2**32, 2**64 - 1, 2**64, -1])
def test_chunks_outside_are_index_errors(chunk: int) -> None:
    block = ControlBlock.create("outside", 2, b"", 0)
    for call in (block.mark_ready, block.is_ready, lambda at: block.wait(at, at, 0), lambda at: block.wait(0, at, 0)):
        with pytest.raises(IndexError):
            call(chunk)
    with pytest.raises(IndexError):
        block.wait(1, 0, 0)
    assert block.ready_count == 0


@pytest.mark.parametrize(("chunk_count", "error"), [(2**32 + 1, ValueError), (2**64, TypeError), (-1, TypeError)])
def test_counts_that_cannot_be_are_refused(chunk_count: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        ControlBlock.create("many", chunk_count, b"", 0)


# ── broken and hostile blocks ──────────────────────────────────────────────────────────────────────

# Offsets of the header's fields; the format is fixed by its version number.
FIELDS = {"magic": (0, "Q"), "version": (8, "I"), "header_bytes": (12, "I"), "chunk_count": (24, "Q"),
          "manifest_bytes": (32, "Q"), "state": (64, "I")}  # fmt: skip


def altered(field: str, value: int) -> bytes:
    offset, code = FIELDS[field]
    content = bytearray(content_of(ControlBlock.create("template", 100, b"manifest", 1)))
    struct.pack_into(code, content, offset, value)
    return bytes(content)


def test_the_template_of_these_tests_is_whole() -> None:
    block = ControlBlock.attach(memory_with(altered("chunk_count", 100)))
    assert (block.chunk_count, block.manifest) == (100, b"manifest")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("magic", 0, "wrong magic"),
        ("magic", 2**64 - 1, "wrong magic"),
        ("version", 2, "version 2, this is version 1"),
        ("header_bytes", 8192, "version"),
        ("chunk_count", 200, "do not make"),
        ("chunk_count", 0, "do not make"),
        ("chunk_count", 2**64 - 1, "do not make"),
        ("chunk_count", 2**63 + 100, "do not make"),
        ("manifest_bytes", 9, "do not make"),
        ("manifest_bytes", 2**64 - 4096 - 16, "do not make"),
        ("manifest_bytes", 2**64 - 1, "do not make"),
        ("state", 3, "state 3"),
        ("state", 2**32 - 1, "state 4294967295"),
    ],
)
def test_a_header_that_lies_is_refused(field: str, value: int, reason: str) -> None:
    before = open_descriptors()
    with pytest.raises(NativeError, match=reason):
        ControlBlock.attach(memory_with(altered(field, value)))
    assert open_descriptors() == before


def test_counts_that_overflow_into_the_right_size_are_refused() -> None:
    # 2^61 words of bits are 2^64 bytes: nothing, to arithmetic that wraps.
    content = bytearray(content_of(ControlBlock.create("template", 0, b"", 1)))
    struct.pack_into("QQ", content, 24, 2**64 - 1, 2**63)
    with pytest.raises(NativeError, match="do not make"):
        ControlBlock.attach(memory_with(bytes(content)))


def poke(block: ControlBlock) -> None:
    """Everything that a reader can ask; only the documented errors may come."""
    for ask in (
        lambda: (block.manifest, block.generation, block.chunk_count, block.ready_count),
        lambda: block.state,
        lambda: block.error,
        lambda: block.is_ready(max(block.chunk_count, 1) - 1),
        lambda: block.wait(0, max(block.chunk_count, 1) - 1, 0),
    ):
        with contextlib.suppress(NativeError, TimeoutError, IndexError):
            ask()


TEMPLATE = altered("chunk_count", 100)


@given(st.integers(0, len(TEMPLATE)))
def test_a_block_cut_anywhere_is_refused(size: int) -> None:
    if size == len(TEMPLATE):
        ControlBlock.attach(memory_with(TEMPLATE))
        return
    with pytest.raises(NativeError):
        ControlBlock.attach(memory_with(TEMPLATE[:size]))


@given(st.dictionaries(st.integers(0, 200) | st.integers(0, len(TEMPLATE) - 1), st.integers(0, 255), max_size=12))
def test_any_bytes_make_an_error_or_a_block_that_can_be_asked(changes: dict[int, int]) -> None:
    content = bytearray(TEMPLATE)
    for offset, byte in changes.items():
        content[offset] = byte
    try:
        block = ControlBlock.attach(memory_with(bytes(content)))
    except NativeError:
        return
    poke(block)


def test_texts_longer_than_their_fields_and_no_utf8_are_read_within_bounds() -> None:
    owner = ControlBlock.create("template", 100, b"manifest", 1)
    owner.fail("code", "message")
    content = bytearray(content_of(owner))
    at = content.index(b"code")
    struct.pack_into("II", content, at - 8, 2**32 - 1, 2**32 - 1)
    content[at : at + 64] = b"\xff" * 64
    block = ControlBlock.attach(memory_with(bytes(content)))
    assert block.error is not None
    assert block.error[0] == "�" * 64
    assert len(block.error[1]) == 2048
    with pytest.raises(SegmentFailed):
        block.wait(0, 0, 1)


def test_what_was_checked_once_is_what_is_used_whatever_the_owner_writes_later() -> None:
    descriptor = os.memfd_create("shifting", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, TEMPLATE)
    memory = mmap.mmap(descriptor, len(TEMPLATE))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    block = ControlBlock.attach(os.dup(descriptor))
    memory[24:40] = b"\xff" * 16
    assert (block.chunk_count, block.manifest) == (100, b"manifest")
    memory[64:68] = b"\xff" * 4
    poke(block)
    with pytest.raises(NativeError, match="state"):
        block.wait(0, 99, PATIENCE_S)
    memory.close()
    os.close(descriptor)


@pytest.mark.parametrize("seals", [0, SEALS & ~0x2, SEALS & ~0x10], ids=["none", "shrink", "write"])
def test_a_block_that_its_owner_could_pull_away_is_refused(seals: int) -> None:
    before = open_descriptors()
    with pytest.raises(NativeError, match="without the seals"):
        ControlBlock.attach(memory_with(TEMPLATE, seals))
    assert open_descriptors() == before


def test_what_is_no_memfd_is_refused() -> None:
    before = open_descriptors()
    for descriptor in (os.open("/dev/null", os.O_RDWR), -1, 10**6):
        with pytest.raises(NativeError, match="not a control block"):
            ControlBlock.attach(descriptor)
    region = owned(PAGE)
    with pytest.raises(NativeError, match="wrong magic"):
        ControlBlock.attach(os.dup(region.fds[0]))
    del region
    assert open_descriptors() == before


@pytest.mark.slow
def test_no_descriptor_leaks() -> None:
    gc.collect()
    before = open_descriptors()
    for _ in range(300):
        owner = ControlBlock.create("leak", 10, b"manifest", 0)
        assert attached(owner).ready_count == 0
        with pytest.raises(NativeError):
            ControlBlock.attach(memory_with(b"short"))
    del owner
    gc.collect()
    assert open_descriptors() == before
