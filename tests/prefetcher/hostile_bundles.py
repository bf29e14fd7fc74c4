"""Bundles that try to write elsewhere, to be a device, or to fill the disk; and some that are none at all."""

from __future__ import annotations

import gzip
import tarfile

from fleetstart.runtime.contract.sizes import GIB, MIB
from tests.prefetcher.nodes import tar_of


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


HOSTILE = {
    "absolute": tar_of({"/etc/evil": b"x"}),
    "parent": tar_of({"../evil": b"x"}),
    "parent inside": tar_of({"a/../../evil": b"x"}),
    "symlink out": tar_of({}, [member("link", tarfile.SYMTYPE, "/etc")]),
    "write through a symlink": tar_of({}, [member("d", tarfile.SYMTYPE, ".."), member("d/evil")]),
    "hard link": tar_of({}, [member("link", tarfile.LNKTYPE, "/etc/passwd")]),
    "character device": tar_of({}, [member("dev", tarfile.CHRTYPE)]),
    "block device": tar_of({}, [member("dev", tarfile.BLKTYPE)]),
    "fifo": tar_of({}, [member("fifo", tarfile.FIFOTYPE)]),
    "the same file twice": tar_of({"a": b"1"}, [member("a")]),
    "a file as a folder": tar_of({"a": b"1"}, [member("a/b")]),
    "not a tar": b"hello, I am no tar" * 100,
    "empty": b"",
    "half a tar": tar_of({"a": b"x" * 5000})[:2000],
    "half a gzip": gzip.compress(tar_of({"a": b"x" * 5000}))[:60],
    "a long path": tar_of({"d/" * 600 + "f": b"x"}),
}


def tar_bomb(size_bytes: int = 2 * GIB) -> bytes:
    """A few megabytes that unpack to one file of this size: a gzip of many equal members."""
    info = tarfile.TarInfo("bomb")
    info.size = size_bytes
    zeros = 64 * MIB
    return gzip.compress(info.tobuf()) + gzip.compress(bytes(zeros), 1) * (size_bytes // zeros)
