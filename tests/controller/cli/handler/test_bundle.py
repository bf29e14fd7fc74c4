from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.cli.handler import bundle
from fleetstart.controller.cli.handler.bundle import make_bundle, pack
from fleetstart.runtime.contract.errors import InvalidSpec, TooLarge


def write(folder: Path, *names: str, content: str = "") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_python_files_are_packed_and_rubbish_is_not(tmp_path: Path) -> None:
    write(tmp_path, "handler.py", "lib/a.py", "lib/deep/b.py", "data.txt", "lib/__pycache__/a.py", ".hidden/c.py")
    write(tmp_path, ".d.py", "venv/e.py", "node_modules/f.py", "own/pyvenv.cfg", "own/lib/g.py", "weights/h.py")
    made = make_bundle(tmp_path, skip=[tmp_path / "weights"])
    assert made.files == ("handler.py", "lib/a.py", "lib/deep/b.py")


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("data/*.json", ["data/a.json"]),
        ("data", ["data/a.json", "data/deep/b.json", "data/deep/c.txt"]),
        ("data/", ["data/a.json", "data/deep/b.json", "data/deep/c.txt"]),
        ("**/*.json", ["data/a.json", "data/deep/b.json"]),
        ("*.txt", ["top.txt"]),
        ("./top.txt", ["top.txt"]),
    ],
)
def test_include_adds_what_it_matches(tmp_path: Path, pattern: str, files: list[str]) -> None:
    write(tmp_path, "handler.py", "top.txt", "data/a.json", "data/deep/b.json", "data/deep/c.txt")
    assert list(make_bundle(tmp_path, include=[pattern]).files) == sorted([*files, "handler.py"])


@pytest.mark.parametrize("pattern", ["../secret", "/etc/passwd", "a/../../b", "~/x", "nothing*"])
def test_include_that_leaves_or_matches_nothing_is_refused(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, "handler.py")
    with pytest.raises(InvalidSpec, match="include pattern"):
        make_bundle(tmp_path, include=[pattern])


def test_the_same_files_give_the_same_bytes_elsewhere_and_later(tmp_path: Path) -> None:
    write(tmp_path / "one", "b.py", "a.py", "lib/c.py", content="x = 1\n")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    os.utime(tmp_path / "two" / "a.py", (1, 1))
    (tmp_path / "two" / "b.py").chmod(0o755)
    one, two = make_bundle(tmp_path / "one"), make_bundle(tmp_path / "two")
    assert one == two
    assert one.id == hashlib.sha256(one.data).hexdigest()
    assert one.key == f"bundles/{one.id}"


@pytest.mark.slow
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}(/[a-zé]{1,60}){0,3}\.py", fullmatch=True), st.binary(max_size=200), max_size=8
    )
)
def test_packing_and_unpacking_gives_the_same_files_whatever_their_order(contents: dict[str, bytes]) -> None:
    data = pack(contents)
    assert data == pack(dict(reversed(contents.items())))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        unpacked = {member.name: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert unpacked == contents
    assert all((member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "") for member in members)


def test_a_bundle_over_the_limit_names_its_biggest_files(tmp_path: Path) -> None:
    write(tmp_path, "handler.py", "small.bin")
    with (tmp_path / "big.bin").open("wb") as big:
        big.truncate(bundle.BUNDLE_MAX_BYTES + 1)
    with pytest.raises(TooLarge, match=r"64 MiB at most; the biggest: big.bin \(64.0 MiB\)"):
        make_bundle(tmp_path, include=["*.bin"])


def test_imports_of_all_files_are_known_and_a_broken_neighbour_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path, "handler.py", content="import lib")
    write(tmp_path, "lib.py", content="def f():\n    import torch")
    write(tmp_path, "broken.py", content="def (")
    assert make_bundle(tmp_path).imports == {"lib", "torch"}


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside", "secret.py")
    write(tmp_path / "inside", "handler.py")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    assert make_bundle(tmp_path / "inside").files == ("handler.py",)
