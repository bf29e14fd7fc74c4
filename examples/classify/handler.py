"""What is in a picture: EfficientNet-Lite0 layer by layer, so that several servers can start it together."""

import base64
import binascii
import io
import json
import math

import numpy
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError

from fleetstart.runtime import Layered, Scale, function
from fleetstart.runtime.contract.errors import InvalidInput

KEPT = 224 / 256
"""Of the picture's shorter side: as it was trained, a border is cut off."""
BEST = 5


@function(weights="./weights", layers="_blocks.{}", memory="1GiB", timeout_s=60, scale=Scale(max=2, keep_alive_s=60))
class Classify(Layered):
    def load(self, weights):
        """Where calls come to: what runs before the blocks and after them."""
        config = json.loads(weights.file("config.json"))
        self.size = config["image_size"]
        self.labels = weights.file("labels.txt").decode().splitlines()
        self.stem = Convolution(weights, "_conv_stem", "_bn0", config["epsilon"], stride=2)
        self.head = Convolution(weights, "_conv_head", "_bn1", config["epsilon"])
        self.classes = weights["_fc.weight"], weights["_fc.bias"]

    def layer(self, weights, index):
        """On whichever server has it: one block, which is called with activations [1, channels, height, width]."""
        return Block(weights, f"_blocks.{index}", json.loads(weights.file("config.json")), index)

    def before(self, picture: bytes):
        """A JPEG or PNG, as it is or in base64."""
        pixels = torch.from_numpy(numpy.array(centre(read(picture), self.size), numpy.float32))
        return F.relu6(self.stem((pixels.permute(2, 0, 1)[None] - 127) / 128))

    def after(self, activations):
        features = F.relu6(self.head(activations)).mean((2, 3))
        scores, found = F.linear(features, *self.classes).softmax(1)[0].topk(BEST)
        best = zip(scores.tolist(), found.tolist(), strict=True)
        return {"labels": [{"label": self.labels[index], "score": round(score, 4)} for score, index in best]}


class Block:
    """An inverted residual: wider, depthwise, narrower, and what came in beside it where that has the same shape."""

    def __init__(self, weights, name, config, index):
        epsilon, stride = config["epsilon"], config["strides"][index]
        wider = f"{name}._expand_conv.weight" in weights
        self.expand = Convolution(weights, f"{name}._expand_conv", f"{name}._bn0", epsilon) if wider else None
        self.depthwise = Convolution(
            weights, f"{name}._depthwise_conv", f"{name}._bn1", epsilon, stride=stride, depthwise=True
        )
        self.project = Convolution(weights, f"{name}._project_conv", f"{name}._bn2", epsilon)
        self.stride = stride

    def __call__(self, x):
        inner = F.relu6(self.expand(x)) if self.expand is not None else x
        inner = self.project(F.relu6(self.depthwise(inner)))
        return inner + x if self.stride == 1 and inner.shape == x.shape else inner


class Convolution:
    """With padding as TensorFlow's "same" has it, then the batch norm."""

    def __init__(self, weights, convolution, norm, epsilon, *, stride=1, depthwise=False):
        self.weight = weights[f"{convolution}.weight"]
        self.norm = [weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        self.epsilon = epsilon
        self.stride = stride
        self.groups = self.weight.shape[0] if depthwise else 1

    def __call__(self, x):
        kernel = self.weight.shape[-1]
        lacking = [max((math.ceil(side / self.stride) - 1) * self.stride + kernel - side, 0) for side in x.shape[:1:-1]]
        x = F.pad(x, [pad for both in lacking for pad in (both // 2, both - both // 2)])
        return F.batch_norm(
            F.conv2d(x, self.weight, None, self.stride, 0, 1, self.groups), *self.norm, eps=self.epsilon
        )


def read(picture):
    for decode in (bytes, lambda data: base64.b64decode(data, validate=True)):
        try:
            return Image.open(io.BytesIO(decode(picture.strip() if decode is not bytes else picture))).convert("RGB")
        except (UnidentifiedImageError, binascii.Error, OSError, Image.DecompressionBombError):
            continue
    raise InvalidInput("the body is no picture", hint="send a JPEG or PNG: curl --data-binary @picture.jpg URL")


def centre(image, size):
    side = round(min(image.size) * KEPT)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
