"""Image classification: the labels of a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from PIL import Image, UnidentifiedImageError
from transformers import AutoImageProcessor, ImageClassificationPipeline

from ..contract.errors import InvalidInput
from .loading import CPU, load_config, load_model
from .shared_pass import ROWS, SharedPass

if TYPE_CHECKING:
    from ..weights.tensor_mapping import TensorMapping

BEST = 5
LONG_SIDE_MAX = 100
"""Most times that a picture's long side is its short one. Many processors scale the short side to a fixed size: a file
of 82 bytes, 1 x 600 pixels, would have 30 million."""


class ImageLabel(TypedDict):
    label: str
    score: float


class ImageClassification:
    """The five best labels of a JPEG, PNG or WebP with their scores, as transformers' pipeline computes them.

    Pictures of concurrent calls share a pass. Errors: InvalidInput for what is no picture, or one that is too thin.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pass = SharedPass(self.compute)

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._pipeline = ImageClassificationPipeline(
            model=load_model(weights, config, kinds=("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",)),
            image_processor=AutoImageProcessor.from_pretrained(weights.folder()),
            device=CPU,
        )

    async def __call__(self, image: bytes) -> list[ImageLabel]:
        return await self._pass.call(image)

    def compute(self, images: list[bytes]) -> Sequence[list[ImageLabel] | InvalidInput]:
        """The labels of each picture, or its error."""
        read = [_picture(image) for image in images]
        pictures = [one for one in read if not isinstance(one, InvalidInput)]
        found = iter(self._labels(pictures) if pictures else [])
        return [one if isinstance(one, InvalidInput) else next(found) for one in read]

    def _labels(self, pictures: list[Image.Image]) -> list[list[ImageLabel]]:
        try:
            found: list[list[ImageLabel]] = self._pipeline(pictures, top_k=BEST, batch_size=ROWS)
        except (ValueError, RuntimeError):
            if len(pictures) == 1:
                raise
            # A processor that leaves pictures at their own sizes: they cannot be rows of one tensor.
            return [self._pipeline(picture, top_k=BEST) for picture in pictures]
        return found


def _picture(image: bytes) -> Image.Image | InvalidInput:
    """The picture, or why it cannot be used. Sides are looked at before anything is decoded."""
    try:
        picture = Image.open(io.BytesIO(image))
        if max(picture.size) > LONG_SIDE_MAX * min(picture.size):
            return InvalidInput(
                f"the picture has {picture.width} x {picture.height} pixels, and its long side may be {LONG_SIDE_MAX} "
                "times the short one",
                hint="cut it, or pad its short side",
            )
        return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return InvalidInput("the body is no picture", hint="send a JPEG or PNG: curl --data-binary @photo.jpg")
