"""Weights as numpy arrays and as a folder: the same bytes, read-only, and no import of torch in the worker."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.ids import CheckpointId
from tests.runtime.segments import Segment
from tests.runtime.workers import Functions

DTYPES = {
    "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `folder()` writes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_has_the_tensors_bytes(dtype: str) -> None:
    segment = Segment({"a": (dtype, (5, 7)), "scalar": (dtype, ()), "none": (dtype, (0, 4))})
    segment.fill(*segment.chunks)
    arrays = segment.attach().numpy()
    assert list(arrays) == ["a", "scalar", "none"]
    assert arrays["a"].dtype == numpy.dtype(DTYPES[dtype])
    assert [arrays[name].shape for name in arrays] == [(5, 7), (), (0, 4)]
    assert arrays["a"].tobytes() == segment.expected("a")


def test_an_array_cannot_be_written() -> None:
    segment = Segment({"a": ("F32", (5,))})
    segment.fill(*segment.chunks)
    with pytest.raises(ValueError, match="read-only"):
        segment.attach().numpy()["a"][0] = 1


def test_an_array_keeps_the_memory_and_waits_for_its_chunks() -> None:
    segment = Segment({"a": ("F32", (5,)), "late": ("F32", (5000,))})
    segment.fill(0)
    arrays = segment.attach(timeout_s=0.2).numpy()
    kept = arrays["a"]
    with pytest.raises(Exception, match="late"):
        arrays["late"]
    del arrays
    expected = segment.expected("a")
    segment.close()
    assert kept.tobytes() == expected


def test_bfloat16_is_refused_by_name_or_widened_on_request() -> None:
    segment = Segment({"half": ("BF16", (300,)), "byte": ("F8_E4M3", (4,))})
    segment.fill(*segment.chunks)
    weights = segment.attach()
    with pytest.raises(TypeError, match=r"'half' is BF16.*widen=True.*float32"):
        weights.numpy()["half"]
    with pytest.raises(TypeError, match=r"'byte' is F8_E4M3.*weights\[name\]"):
        weights.numpy(widen=True)["byte"]


@given(st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=50))
def test_widened_bfloat16_has_the_same_values(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    segment = Segment({"t": ("BF16", tuple(tensor.shape))}, contents={"t": bytes(tensor.view(torch.uint8).numpy())})
    segment.fill(*segment.chunks)
    found = segment.attach().numpy(widen=True)["t"]
    assert found.dtype == numpy.float32
    assert found.tolist() == tensor.float().tolist()


def test_an_unknown_name_suggests_the_nearest() -> None:
    segment = Segment({"coefficients": ("F32", (5,))})
    with pytest.raises(KeyError, match="nearest: 'coefficients'"):
        segment.attach().numpy()["coefficient"]


@pytest.mark.usefixtures("folders")
def test_the_folder_has_the_small_files_and_is_made_once() -> None:
    segment = Segment({"a": ("F32", (5,))}, {"config.json": b"{}", "tokenizer.json": b"[1]"})
    segment.fill(*segment.chunks)
    weights = segment.attach()
    folder = weights.folder()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}",
        "tokenizer.json": b"[1]",
    }
    assert [stat.S_IMODE(os.stat(path).st_mode) & 0o222 for path in (folder, *folder.iterdir())] == [0, 0, 0]
    assert weights.folder() == folder


def test_a_worker_has_both_and_never_imports_torch(functions: Functions) -> None:
    values = numpy.arange(6, dtype=numpy.float32)
    segment = Segment(
        {"coefficients": ("F32", (2, 3))},
        {"config.json": b'{"labels": ["no", "yes"]}'},
        {"coefficients": values.tobytes()},
    )
    segment.fill(*segment.chunks)
    worker = functions.server.fork().pooled()
    bundle = functions.bundle(
        """
        import json
        import sys

        class Classify:
            def load(self, weights):
                self.table = weights.numpy()["coefficients"]
                self.labels = json.loads((weights.folder() / "config.json").read_text())["labels"]

            def __call__(self, features: list[float]):
                scores = self.table @ features
                return {"label": self.labels[scores.argmax()], "scores": scores, "torch": "torch" in sys.modules}
        """
    )
    worker.assign(bundle, "handler:Classify", segment.fds, weights=CheckpointId("0" * 64))
    worker.ready()
    answer = json.loads(worker.post({"features": [1, 0, 2]}).content)
    assert answer == {"label": "yes", "scores": [4.0, 13.0], "torch": False}
