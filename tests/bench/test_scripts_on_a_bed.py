"""Smoke tests of the benchmarks on a test bed; in a file of their own, so that the longest runs beside the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_scripts import ON_A_BED, run
from tests.testbed import why_not

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ON_A_BED)
def test_it_runs(name: str, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no test bed: {reason}")
    run(name, tmp_path / "found.json", timeout_s=290)
