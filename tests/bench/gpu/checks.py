"""Tests marked `gpu`, and those of engines, which compute on the GPU where there is one; each with its outcome.

On a GPU one that is skipped has failed: what it needs is there.

Run by `python -m tests.bench.gpu`, or alone: python -m tests.bench.gpu.checks [--device cpu] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.bench.harness.samples import ROOT, Report, parse_options
from tests.containers.engine import why_none

FILES = (
    "tests/e2e/calls/test_gpus.py",
    "tests/runtime/llm/engine/test_golden.py",
    "tests/runtime/llm/engine/test_sampler.py",
    "tests/runtime/llm/engine/test_steps_ahead.py",
    "tests/runtime/llm/model/test_adapters.py",
    "tests/runtime/llm/model/cuda/test_decode_graphs.py",
    "tests/runtime/llm/model/cuda/test_decode_kernels.py",
    "tests/runtime/llm/model/test_decoders.py",
    "tests/runtime/llm/model/test_families.py",
    "tests/runtime/llm/model/test_first_steps.py",
    "tests/runtime/llm/model/test_torch_attention.py",
    "tests/runtime/llm/model/test_torch_devices.py",
    "tests/runtime/llm/server/test_kv_memory.py",
    "tests/runtime/llm/server/test_warmup.py",
    "tests/runtime/weights/test_device.py",
    "tests/runtime/worker/test_device_init.py",
)
"""Files with tests marked `gpu`: collecting all files would take longer than the tests."""
CONTAINER_FILES = ("tests/e2e/isolation/test_container_gpus.py",)
"""Files that need a container engine beside the GPU."""
ENGINE_FILES = (
    "tests/runtime/llm/engine/test_adapter_engines.py",
    "tests/runtime/llm/engine/test_inference_engine.py",
    "tests/runtime/llm/engine/test_two_engines.py",
    "tests/runtime/llm/model/test_families.py",
    "tests/runtime/llm/server/test_engines.py",
)
"""Files whose engines, native, transformers and vLLM, take the GPU by themselves."""
TOGETHER = ("-n", "4", "--dist", "loadfile")
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def outcomes(report: Path) -> dict[str, str]:
    """Outcome of each test by its name, from pytest's report: passed, "skipped: why" or "failed: why"."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name', '').removeprefix('test_')}"
        found[name] = PASSED
        for kind, said in (("skipped", SKIPPED), ("failure", FAILED), ("error", FAILED)):
            if (element := case.find(kind)) is not None:
                lines = (element.get("message") or "").splitlines() or [""]
                found[name] = f"{said}: {lines[0]}"
    return found


def main() -> None:
    options = parse_options(__doc__, rounds=1, quick_rounds=1)
    report = Report("the tests that need a GPU pass on one")
    with tempfile.TemporaryDirectory(prefix="fs-gpu-checks-") as folder:
        found: dict[str, str] = {}
        code = 0
        runs = [["-m", "gpu", *FILES]]
        if options.device == "cuda":  # elsewhere all of the first run are skipped, and the second one is in `make test`
            containers = [] if why_none() else CONTAINER_FILES
            runs = [[*TOGETHER, "-m", "gpu", *FILES, *containers], [*TOGETHER, "-m", "not gpu", *ENGINE_FILES]]
        for arguments in runs:
            written = Path(folder) / f"{len(found)}.xml"
            argv = [sys.executable, "-m", "pytest", "--quiet", f"--junitxml={written}", *arguments]
            code |= subprocess.run(argv, cwd=ROOT).returncode
            found |= outcomes(written) if written.exists() else {}
    report.samples = {"outcomes": found}
    counts = {said: sum(outcome.startswith(said) for outcome in found.values()) for said in (PASSED, SKIPPED, FAILED)}
    rows = [["tests", *counts], [options.device, *map(str, counts.values())]]
    rows += [[name, "", "", outcome] for name, outcome in found.items() if outcome.startswith(FAILED)]
    report.tell("Checks", rows)
    report.save(options.json)
    lacking = options.device == "cuda" and counts[SKIPPED]
    sys.exit(1 if code or lacking or not found else 0)


if __name__ == "__main__":
    main()
