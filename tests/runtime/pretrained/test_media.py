"""`Transformers` on sound and pictures: what transformers itself computes from the same folder, to 1e-6."""

from __future__ import annotations

import io
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("soxr")

import soundfile
from PIL import Image

from fleetstart.runtime.contract.errors import InvalidInput
from tests.runner.late import late
from tests.runtime.pretrained.models import save_listener, save_viewer, save_whisper
from tests.runtime.pretrained.served import Served

transformers = late("transformers")

RATE = 16_000
HOPPER = Path(__file__).parents[3] / "examples" / "classify" / "hopper.jpg"


def read_samples(data: bytes, rate: int) -> Any:
    from fleetstart.runtime.pretrained.speech import read_samples as read  # imports half of transformers

    return read(data, rate)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `folder()` writes."""
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))


served = Served


def sound(seconds: float, *, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    time = numpy.arange(round(seconds * rate)) / rate
    wave_form = 0.4 * numpy.sin(2 * numpy.pi * 220 * time * (1 + time)) + 0.2 * numpy.sin(2 * numpy.pi * 700 * time)
    kind = {1: numpy.uint8, 2: numpy.int16, 4: numpy.int32}[width]
    values = (wave_form * ((1 << (8 * width - 1)) - 1) + (128 if width == 1 else 0)).astype(kind)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(numpy.repeat(values, channels).tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_listener(tmp_path_factory.mktemp("listener"))


@pytest.mark.parametrize("seconds", [1.0, 31.0])
def test_sound_is_heard_as_the_pipeline_hears_it(listener: Path, seconds: float) -> None:
    data = sound(seconds)
    samples = numpy.frombuffer(data[44:], numpy.int16).astype(numpy.float32) / (1 << 15)
    plain = transformers.pipeline("automatic-speech-recognition", str(listener))
    expected = plain({"raw": samples, "sampling_rate": RATE}, chunk_length_s=30 if seconds > 30 else 0)
    found = served(listener, "automatic-speech-recognition")(data)
    assert len(found["text"]) > 3
    assert found == {"text": expected["text"]}


def test_a_whisper_writes_what_the_pipeline_writes(tmp_path: Path) -> None:
    folder = save_whisper(tmp_path / "model")
    data = sound(2.0)
    samples = numpy.frombuffer(data[44:], numpy.int16).astype(numpy.float32) / (1 << 15)
    expected = transformers.pipeline("automatic-speech-recognition", str(folder))(
        {"raw": samples, "sampling_rate": RATE}
    )
    found = served(folder, "automatic-speech-recognition")(data)
    assert len(found["text"]) > 3
    assert found == {"text": expected["text"]}


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (4, 1), (2, 2)])
def test_samples_of_other_widths_and_channels_are_the_same_sound(width: int, channels: int) -> None:
    plain = read_samples(sound(0.2), RATE)
    other = read_samples(sound(0.2, width=width, channels=channels), RATE)
    assert other == pytest.approx(plain, abs=0.02 if width == 1 else 1e-4)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_sound_of_another_rate_is_resampled(rate: int) -> None:
    found = read_samples(sound(0.5, rate=rate), RATE)
    wanted = read_samples(sound(0.5), RATE)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(400, 7_600)  # its ends have no neighbours
    assert numpy.abs(found[: len(wanted)][inner] - wanted[: len(found)][inner]).max() < 2e-3


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_other_kinds_of_files_are_the_same_sound(kind: str) -> None:
    plain = read_samples(sound(0.5), RATE)
    file = io.BytesIO()
    soundfile.write(file, plain, RATE, format=kind)
    found = read_samples(file.getvalue(), RATE)
    if kind == "FLAC":
        assert numpy.array_equal(found, plain)
    else:
        assert len(found) >= len(plain) > 0


def test_a_rate_is_no_matter_to_the_words(listener: Path) -> None:
    handler = served(listener, "automatic-speech-recognition")
    assert handler(sound(1.0, rate=48_000, channels=2))["text"] == handler(sound(1.0))["text"]


def test_what_cannot_be_heard_is_refused_with_the_command_that_converts_it() -> None:
    with pytest.raises(InvalidInput, match="no sound that can be read") as refused:
        read_samples(b"no sound", RATE)
    assert "ffmpeg" in refused.value.hint
    assert "-ar 16000" in refused.value.hint


def test_a_picture_has_the_labels_that_the_pipeline_gives_it(tmp_path: Path) -> None:
    folder = save_viewer(tmp_path / "model")
    expected = transformers.pipeline("image-classification", str(folder), top_k=5)(Image.open(HOPPER).convert("RGB"))
    handler = served(folder, "image-classification")
    found = handler(HOPPER.read_bytes())
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], rel=0, abs=1e-6)
    with pytest.raises(InvalidInput, match="no picture"):
        handler(b"no picture")


def test_pictures_of_calls_at_a_time_share_a_pass(tmp_path: Path) -> None:
    handler = served(save_viewer(tmp_path / "model"), "image-classification")
    pictures = []
    for angle in range(0, 180, 30):
        file = io.BytesIO()
        Image.open(HOPPER).rotate(angle, expand=True).save(file, "PNG")
        pictures.append(file.getvalue())
    alone = [handler(picture) for picture in pictures]
    found, passes = handler.together([(one,) for one in (*pictures[:3], b"no picture", *pictures[3:])])
    refused = found.pop(3)
    assert isinstance(refused, InvalidInput)
    assert passes == 2, "the first call computes at once, the others together"
    for answer, expected in zip(found, alone, strict=True):
        assert [one["label"] for one in answer] == [one["label"] for one in expected]
        scores = [one["score"] for one in expected]
        assert [one["score"] for one in answer] == pytest.approx(scores, rel=0, abs=1e-6)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_a_picture_that_is_far_too_thin_is_refused_alone(tmp_path: Path) -> None:
    """Processors that scale the short side would make a picture of gigabytes of it."""
    handler = served(save_viewer(tmp_path / "model"), "image-classification")
    pictures = [png(9, 9), png(1, 101), png(1, 100), png(501, 5), png(100, 1)]
    found, _ = handler.together([(one,) for one in pictures])
    refused = [one for one in found if isinstance(one, InvalidInput)]
    assert [found.index(one) for one in refused] == [1, 3]
    assert str(refused[0]) == "the picture has 1 x 101 pixels, and its long side may be 100 times the short one"
    assert str(refused[1]).startswith("the picture has 501 x 5 pixels")
