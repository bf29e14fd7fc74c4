"""Bundles: valid ones appear once and whole, hostile ones leave nothing behind."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from fleetstart.prefetcher.layers import bundle_unpacking as module
from fleetstart.prefetcher.layers.bundle_unpacking import unpack
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.prefetcher.workers.bundles import BundleCache
from fleetstart.runtime.contract.errors import ChecksumMismatch, FleetError, InvalidSpec, NotFound, TooLarge
from fleetstart.runtime.contract.ids import BundleId
from tests.prefetcher.hostile_bundles import HOSTILE, member
from tests.prefetcher.nodes import Store, tar_of


def fetch(source: Source, folder: Path, bundle: BundleId) -> Path:
    return asyncio.run(BundleCache(folder=folder, source=source).get(bundle))


def test_a_bundle_is_fetched_checked_and_unpacked(source: Source, store: Store, tmp_path: Path) -> None:
    bundle = store.put_bundle({"handler.py": "x = 1\n", "pkg/mod.py": "y = 2\n"})

    folder = fetch(source, tmp_path / "bundles", bundle)

    assert (folder / "handler.py").read_text() == "x = 1\n"
    assert (folder / "pkg/mod.py").read_text() == "y = 2\n"
    assert list((tmp_path / "bundles").iterdir()) == [folder.parent]


def test_no_release_takes_the_folders_of_another_for_bundles(store: Store, tmp_path: Path) -> None:
    """Releases before had a bundle's files in a folder with its digest."""
    source, bundle = FolderSource(store.folder), store.put_bundle({"handler.py": "x = 1\n"})
    of_before = tmp_path / "bundles" / bundle
    of_before.mkdir(parents=True)
    assert (fetch(source, tmp_path / "bundles", bundle) / "handler.py").read_text() == "x = 1\n"
    assert not of_before.exists()


def test_an_unpacked_bundle_is_used_again_without_the_store(store: Store, tmp_path: Path) -> None:
    bundle = store.put_bundle({"handler.py": ""})
    fetch(FolderSource(store.folder), tmp_path / "bundles", bundle)
    store.path(f"bundles/{bundle}").unlink()

    assert fetch(FolderSource(store.folder), tmp_path / "bundles", bundle).is_dir()


def test_a_file_that_a_crash_of_the_machine_cut_is_noticed_after_the_boot(store: Store, tmp_path: Path) -> None:
    source, content = FolderSource(store.folder), "x = 1\n"
    bundle = store.put_bundle({"handler.py": content, "pkg/mod.py": "y = 2\n"})
    folder = fetch(source, tmp_path / "bundles", bundle)
    boot = folder.parent / "boot"
    boot.write_text("an earlier one")
    (folder / "written.pyc").write_bytes(b"by a worker")
    assert BundleCache(folder=tmp_path / "bundles", source=source).ready(bundle) == folder
    assert boot.read_text() != "an earlier one"
    boot.write_text("an earlier one")
    (folder / "handler.py").write_bytes(b"")

    assert BundleCache(folder=tmp_path / "bundles", source=source).ready(bundle) is None
    assert (fetch(source, tmp_path / "bundles", bundle) / "handler.py").read_text() == content


@pytest.mark.parametrize("lost", ["boot", "sizes.json", "files/pkg/mod.py"])
def test_a_bundle_of_which_something_is_lost_is_fetched_again(store: Store, tmp_path: Path, lost: str) -> None:
    bundle = store.put_bundle({"handler.py": "x = 1\n", "pkg/mod.py": "y = 2\n"})
    folder = fetch(FolderSource(store.folder), tmp_path / "bundles", bundle)
    (folder.parent / "boot").write_text("an earlier one")
    (folder.parent / lost).unlink()

    folder = fetch(FolderSource(store.folder), tmp_path / "bundles", bundle)

    assert (folder / "pkg/mod.py").read_text() == "y = 2\n"


def test_ten_callers_fetch_once(store: Store, tmp_path: Path) -> None:
    bundle = store.put_bundle({"handler.py": ""})

    class Counting(FolderSource):
        reads = 0

        def read_object(self, key: str, limit_bytes: int) -> bytes:
            self.reads += 1
            return super().read_object(key, limit_bytes)

    source = Counting(store.folder)

    async def scenario() -> None:
        bundles = BundleCache(folder=tmp_path / "bundles", source=source)
        await asyncio.gather(*(bundles.get(bundle) for _ in range(10)))

    asyncio.run(scenario())
    assert source.reads == 1


def test_a_gzipped_tar_is_read_as_well(tmp_path: Path) -> None:
    folder = unpack(gzip.compress(tar_of({"a": b"1"})), tmp_path / "target")

    assert (folder / "a").read_bytes() == b"1"


def test_half_a_bundle_of_a_dead_daemon_is_removed(store: Store, tmp_path: Path) -> None:
    leftover = tmp_path / "bundles" / ".new-1234"
    leftover.mkdir(parents=True)

    BundleCache(folder=tmp_path / "bundles", source=FolderSource(store.folder))

    assert not leftover.exists()


@pytest.mark.parametrize(
    ("bundle", "error"),
    [("0" * 64, NotFound), ("../../etc", InvalidSpec), ("", InvalidSpec), ("A" * 64, InvalidSpec)],
)
def test_a_bundle_that_is_not_there_is_refused(
    store: Store, tmp_path: Path, bundle: str, error: type[FleetError]
) -> None:
    with pytest.raises(error):
        fetch(FolderSource(store.folder), tmp_path / "bundles", BundleId(bundle))


def test_bytes_of_another_digest_are_refused(store: Store, tmp_path: Path) -> None:
    store.put("bundles/" + "1" * 64, tar_of({"handler.py": b""}))

    with pytest.raises(ChecksumMismatch):
        fetch(FolderSource(store.folder), tmp_path / "bundles", BundleId("1" * 64))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_bundle_leaves_nothing(store: Store, tmp_path: Path, name: str) -> None:
    data = HOSTILE[name]
    bundle = BundleId(hashlib.sha256(data).hexdigest())
    store.put(f"bundles/{bundle}", data)
    folder = tmp_path / "home" / "bundles"

    with pytest.raises(InvalidSpec):
        fetch(FolderSource(store.folder), folder, bundle)

    assert list(folder.iterdir()) == []
    assert not list(tmp_path.rglob("evil"))


def test_a_bundle_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNPACKED_MAX_BYTES", 1000)
    monkeypatch.setattr(module, "MEMBERS_MAX", 3)

    with pytest.raises(TooLarge, match="bytes"):
        unpack(gzip.compress(tar_of({"bomb": bytes(2000)})), tmp_path / "a")
    with pytest.raises(TooLarge, match="3 files"):
        unpack(tar_of({str(number): b"" for number in range(4)}), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def _with_header(kind: bytes, size: int) -> bytes:
    """A tar whose first member's name, or PAX attributes, are `size` zeros."""
    header = member("././@LongLink" if kind == tarfile.GNUTYPE_LONGNAME else "pax", kind)
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(-(-size // 512) * 512) + tar_of({"a": b"x"})


KINDS = [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [True, False])
def test_a_long_header_is_refused_unread(tmp_path: Path, kind: bytes, packed: bool) -> None:
    """A few hundred KB of bundle took the daemon half a GB and more."""
    size = 64 << 20
    data = gzip.compress(_with_header(kind, size), 1) if packed else _with_header(kind, size)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidSpec, match="a header of"):
            unpack(data, tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < size / 8
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_many_headers_in_a_row_are_refused(tmp_path: Path) -> None:
    header = member("pax", tarfile.XGLTYPE)
    record = b"20 comment=" + b"y" * 8 + b"\n"
    header.size = len(record)
    one = header.tobuf(tarfile.GNU_FORMAT) + record.ljust(512, b"\0")
    with pytest.raises(InvalidSpec):
        unpack(one * 20_000 + tar_of({"a": b"x"}), tmp_path / "a")


def test_a_long_name_within_the_limit_is_read(tmp_path: Path) -> None:
    name = "/".join(["folder" * 10] * 10) + "/file.py"
    assert (unpack(tar_of({name: b"x"}), tmp_path / "a") / name).read_bytes() == b"x"


def test_modes_are_ours_not_the_tars(tmp_path: Path) -> None:
    plain, tool = member("plain"), member("tool")
    plain.mode, tool.mode = 0o4666, 0o6755

    folder = unpack(tar_of({}, [plain, tool]), tmp_path / "target")

    assert (folder / "plain").stat().st_mode & 0o7777 == 0o644
    assert (folder / "tool").stat().st_mode & 0o7777 == 0o755
