"""Tasks on sound and pictures: speech recognition, image classification."""

from __future__ import annotations

import io
import threading
import wave
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy
from PIL import Image, UnidentifiedImageError
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutomaticSpeechRecognitionPipeline,
    AutoTokenizer,
    ImageClassificationPipeline,
)

from ..contract.errors import InvalidInput
from .loading import CPU, load_config, load_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..weights.tensor_mapping import TensorMapping

SECONDS_AT_ONCE = 30
"""Longer sound is heard in overlapping pieces of this length, as models are trained on."""
BEST = 5
_PCM = {1: (numpy.uint8, 128.0), 2: (numpy.int16, 0.0), 4: (numpy.int32, 0.0)}
"""Bytes of a sample → its type, and the value of silence."""


class Transcript(TypedDict):
    text: str


class ImageLabel(TypedDict):
    label: str
    score: float


class SpeechRecognition:
    """The words in a WAV file, as transformers' pipeline hears them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        kinds = ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_FOR_CTC_MAPPING")
        folder = weights.folder()
        model = load_model(weights, config, kinds=kinds)
        self._listener = AutoFeatureExtractor.from_pretrained(folder)
        self._rate = int(self._listener.sampling_rate)
        if "generation_config.json" in weights.files:
            model.generation_config = type(model.generation_config).from_pretrained(folder)
        self._pipeline = AutomaticSpeechRecognitionPipeline(
            model=model, tokenizer=AutoTokenizer.from_pretrained(folder), feature_extractor=self._listener, device=CPU
        )

    def __call__(self, audio: bytes) -> Transcript:
        samples = _samples(audio, self._rate)
        long = len(samples) > SECONDS_AT_ONCE * self._rate
        with self._lock:
            found = self._pipeline(
                {"raw": samples, "sampling_rate": self._rate}, chunk_length_s=SECONDS_AT_ONCE if long else 0
            )
        return {"text": found["text"]}


class ImageClassification:
    """The five best labels of a JPEG, PNG or WebP with their scores, as transformers' pipeline computes them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._pipeline = ImageClassificationPipeline(
            model=load_model(weights, config, kinds=("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",)),
            image_processor=AutoImageProcessor.from_pretrained(weights.folder()),
            device=CPU,
        )

    def __call__(self, image: bytes) -> list[ImageLabel]:
        picture = _picture(image)
        with self._lock:
            found: list[ImageLabel] = self._pipeline(picture, top_k=BEST)
        return found


def _samples(audio: bytes, rate: int) -> NDArray[numpy.float32]:
    """Samples of a WAV from -1 to 1, its channels averaged. Errors: InvalidInput, also for another rate."""
    try:
        with wave.open(io.BytesIO(audio)) as file:
            width, channels, found = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise InvalidInput(f"the body is no WAV file: {error}", hint=_ffmpeg(rate)) from error
    if found != rate:
        raise InvalidInput(f"the sound has {found} samples a second, the model takes {rate}", hint=_ffmpeg(rate))
    if width not in _PCM:
        raise InvalidInput(f"the sound has {8 * width} bits a sample: 8, 16 or 32 are read", hint=_ffmpeg(rate))
    kind, silence = _PCM[width]
    values = numpy.frombuffer(data, kind).astype(numpy.float32) - numpy.float32(silence)
    mono: NDArray[numpy.float32] = values.reshape(-1, channels).mean(1, dtype=numpy.float32)
    return mono / numpy.float32(1 << (8 * width - 1))


def _ffmpeg(rate: int) -> str:
    return f"convert it: ffmpeg -i INPUT -ar {rate} -ac 1 -c:a pcm_s16le out.wav"


def _picture(image: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(image)).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise InvalidInput(
            "the body is no picture", hint="send a JPEG or PNG: curl --data-binary @photo.jpg"
        ) from error
