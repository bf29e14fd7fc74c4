"""As test_scripts; in a file of its own, so that the longest of them runs beside the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_scripts import ON_A_BED, run
from tests.testbed import why_not

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(bool(why_not()), reason=f"no test bed: {why_not()}")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ON_A_BED)
def test_it_runs(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "found.json", timeout_s=290)
