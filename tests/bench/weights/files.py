"""Checkpoint of the benchmark of weights in its formats, samples of loads, and shuffled rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import llama
from tests.bench.harness.range_server import BUCKET
from tests.bench.harness.samples import Options, Report, progress
from tests.bench.weights import ours
from tests.bench.weights.loaders import LoaderFailed, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """One checkpoint: as Hugging Face has it, and as ours in a store whose folders are buckets."""

    folder: Path
    source: Path
    root: Path
    checkpoint: str
    parts: list[Path]

    @property
    def store(self) -> Path:
        return self.root / BUCKET

    @property
    def prefix(self) -> str:
        """Prefix of the objects' keys."""
        return str(self.parts[0].parent.relative_to(self.store))

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.parts)


def make_files(folder: Path, shape: llama.Shape) -> Files:
    """Writes the files, once for all parts."""
    source = folder / "hf" / "model.safetensors"
    if not source.exists():
        llama.make(source, shape)
    root = folder / "buckets"
    checkpoint, parts = ours.publish(source, root / BUCKET, folder / "ids")
    return Files(folder=folder, source=source, root=root, checkpoint=checkpoint, parts=parts)


def in_rounds(options: Options, runners: Mapping[str, Callable[[], Sample]], what: str) -> dict[str, list[Sample]]:
    """A sample of each a round, in an order of its own. Who fails is left out, and why. A first round is not kept."""
    found: dict[str, list[Sample]] = {name: [] for name in runners}
    left = dict(runners)
    for number in range(options.quick, options.rounds + 1):
        progress(f"{what}: round {number} of {options.rounds}" if number else f"{what}: a round that does not count")
        order = list(left)
        random.Random(number).shuffle(order)
        for name in order:
            try:
                sample = left[name]()
            except LoaderFailed as error:
                progress(f"{name} does not run here: {error}")
                del left[name]
                found[name].clear()
                continue
            if number:
                found[name].append(sample)
    return found


def record(report: Report, part: str, found: dict[str, list[Sample]]) -> None:
    report.samples[part] = {name: [list(sample) for sample in samples] for name, samples in found.items()}
