"""Speech recognition: the words in a sound file."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy
import soundfile
import soxr
from transformers import AutoFeatureExtractor, AutomaticSpeechRecognitionPipeline, AutoTokenizer

from ..contract.errors import InvalidInput
from .loading import CPU, load_config, load_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..weights.tensor_mapping import TensorMapping

SECONDS_AT_ONCE = 30
"""Longer sound is heard in overlapping pieces of this length, as models are trained on."""


class Transcript(TypedDict):
    text: str


class SpeechRecognition:
    """The words in a WAV, FLAC, OGG or MP3 file, as transformers' pipeline hears them. One call at a time."""

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
        samples = read_samples(audio, self._rate)
        long = len(samples) > SECONDS_AT_ONCE * self._rate
        with self._lock:
            found = self._pipeline(
                {"raw": samples, "sampling_rate": self._rate}, chunk_length_s=SECONDS_AT_ONCE if long else 0
            )
        return {"text": found["text"]}


def read_samples(audio: bytes, rate: int) -> NDArray[numpy.float32]:
    """Samples of a sound file from -1 to 1 at this rate, its channels averaged. Errors: InvalidInput."""
    try:
        values, found = soundfile.read(io.BytesIO(audio), dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise InvalidInput(
            f"the body is no sound that can be read: {error}",
            hint=f"send WAV, FLAC, OGG or MP3, or convert it: ffmpeg -i INPUT -ar {rate} -ac 1 -c:a pcm_s16le out.wav",
        ) from error
    mono: NDArray[numpy.float32] = values.mean(1, dtype=numpy.float32)
    if found == rate or not len(mono):
        return mono
    resampled: NDArray[numpy.float32] = soxr.resample(mono, found, rate)
    return resampled
