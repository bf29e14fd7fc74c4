"""Kernels of a trial, as files of the folder in which Triton looks for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetstart.runtime.llm.vllm_engine import compiled_kernels
from fleetstart.runtime.llm.vllm_engine.compiled_kernels import read_kernels, write_kernels


def compiled(folder: Path) -> None:
    """What Triton leaves of one kernel and of its driver's module."""
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


def test_no_folder_and_too_many_bytes_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_kernels(tmp_path / "none").files
    compiled(tmp_path / "trial")
    monkeypatch.setattr(compiled_kernels, "LIMIT_BYTES", 8)
    assert not read_kernels(tmp_path / "trial").files


def test_what_is_kept_is_offered_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    cache = SimpleNamespace(triton_key=lambda: asked.append("its key"))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path / "worker")))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    monkeypatch.setattr(compiled_kernels, "_of_trial", compiled_kernels.CompiledKernels())
    compiled_kernels.offer_kernels()
    compiled_kernels.keep_kernels(tmp_path / "none")
    assert not asked, "nothing was compiled, so the compiler is not read"
    compiled(tmp_path / "trial")
    compiled_kernels.keep_kernels(tmp_path / "trial")
    assert asked == ["its key"]
    assert not (tmp_path / "worker").exists()
    compiled_kernels.offer_kernels()
    assert (tmp_path / "worker" / "KEY" / "add.cubin").exists()


def test_a_triton_without_such_a_folder_compiles_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace())
    compiled(tmp_path / "trial")
    monkeypatch.setattr(compiled_kernels, "_of_trial", read_kernels(tmp_path / "trial"))
    compiled_kernels.offer_kernels()
