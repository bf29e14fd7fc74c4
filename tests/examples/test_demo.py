"""`make demo` shows what it promises, and leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def test_the_demo_deploys_wakes_answers_and_bills(tmp_path: Path) -> None:
    if not (ROOT / "examples/chat/weights/model.safetensors").exists():
        pytest.skip("no weights: make models")
    demo = [sys.executable, str(ROOT / "examples" / "demo.py"), str(tmp_path / "home")]
    result = subprocess.run(demo, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    out = result.stdout
    assert re.search(r"^http://127\.0\.0\.1:\d+/fn/chat$", out, re.MULTILINE)
    for phase in ("queue", "fetch", "load", "execute"):
        assert re.search(rf"^{phase}\s.*[▏▎▍▌▋▊▉█].* ms", out, re.MULTILINE), phase
    assert re.search(r"^chat +1 +invocation +2 .*\$0\.\d{9}$", out, re.MULTILINE)
    assert re.search(r"^total +\d+ .*\$0\.\d{9}$", out, re.MULTILINE)
    assert "cold start" in result.stderr
    assert "hot start" in result.stderr
    assert not (tmp_path / "home").exists()
