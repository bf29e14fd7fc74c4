"""Kernels of a trial, as files of the folder in which Triton looks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from fleetstart.runtime.llm.vllm_engine.compiled_kernels import read_kernels, write_kernels


def compiled(folder: Path) -> None:
    """Writes files as Triton leaves them of one kernel and of its driver's module."""
    kernel = folder / "KEY"
    kernel.mkdir(parents=True)
    (kernel / "add.cubin").write_bytes(b"\x7fELF")
    (kernel / "add.json").write_text("{}")
    children = {name: str(kernel / name) for name in ("add.cubin", "add.json")}
    (kernel / "__grp__add.json").write_text(json.dumps({"child_paths": children}))
    (folder / "OTHER").mkdir()
    (folder / "OTHER" / "cuda_utils.so").write_bytes(b"\x7fELF")


def test_another_folder_gets_the_same_files_with_its_own_paths(tmp_path: Path) -> None:
    before, after = tmp_path / "trial", tmp_path / "worker" / "cache"
    compiled(before)
    write_kernels(read_kernels(before), after)
    names = {path.relative_to(after) for path in after.rglob("*") if path.is_file()}
    assert names == {path.relative_to(before) for path in before.rglob("*") if path.is_file()}
    for name, path in json.loads((after / "KEY" / "__grp__add.json").read_text())["child_paths"].items():
        assert Path(path) == after / "KEY" / name
        assert Path(path).read_bytes() == (before / "KEY" / name).read_bytes()


def test_what_is_there_stays(tmp_path: Path) -> None:
    before, after = tmp_path / "trial", tmp_path / "worker"
    compiled(before)
    (after / "KEY").mkdir(parents=True)
    (after / "KEY" / "add.json").write_text("own")
    write_kernels(read_kernels(before), after)
    assert (after / "KEY" / "add.json").read_text() == "own"


def test_no_folder_and_too_many_bytes_are_no_kernels(tmp_path: Path) -> None:
    assert not read_kernels(tmp_path / "none").files
    compiled(tmp_path / "trial")
    assert read_kernels(tmp_path / "trial").files
    assert not read_kernels(tmp_path / "trial", limit_bytes=8).files


OFFERS = """
import sys
from pathlib import Path
from fleetstart.runtime.llm.vllm_engine.compiled_kernels import keep_kernels, offer_kernels
trial, offered = map(Path, sys.argv[1:])
keep_kernels(trial / "none")
offer_kernels()
assert not offered.exists()
keep_kernels(trial)
assert not offered.exists()
offer_kernels()
print(offered.exists())
"""


def test_what_is_kept_is_offered_where_triton_looks_if_it_is_there(tmp_path: Path) -> None:
    compiled(tmp_path / "trial")
    folder = tmp_path / "worker"
    argv = [sys.executable, "-c", OFFERS, str(tmp_path / "trial"), str(folder / "KEY" / "add.cubin")]
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == [str(find_spec("triton") is not None)], ran.stderr[-2000:]
