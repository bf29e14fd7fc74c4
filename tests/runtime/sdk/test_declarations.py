"""Declarations: light, faithful, and strict about names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import fleetstart.runtime
from fleetstart.runtime import LLM, SLO, Layered, Scale, Transformers, function
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.sdk.declarations import ATTRIBUTE


def settings_of(target: Any) -> dict[str, Any]:
    return dict(getattr(target, ATTRIBUTE).settings)


def test_the_room_exports_what_it_says() -> None:
    names = [
        "LLM",
        "SLO",
        "File",
        "FleetError",
        "HandlerResponse",
        "InvalidInput",
        "Layered",
        "Limits",
        "Response",
        "Scale",
        "Transformers",
        "acall",
        "batched",
        "call",
        "context",
        "function",
    ]
    assert sorted(fleetstart.runtime.__all__) == sorted([*names, "on_exit", "VolumeConflict", "VolumeError", "volume"])
    for name in fleetstart.runtime.__all__:
        assert getattr(fleetstart.runtime, name) is not None


def test_a_declared_function_stays_itself() -> None:
    @function(memory="1GiB", scale=Scale(max=8))
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == 4
    assert settings_of(double) == {"memory": "1GiB", "scale": Scale(max=8)}


def test_a_function_and_an_llm_take_an_slo() -> None:
    promised = SLO(ttft_s=2, tpot_s=0.2)
    assert settings_of(function(slo=promised)(lambda: None)) == {"slo": promised}
    assert dict(LLM(weights="./w", slo=promised).settings)["slo"] == promised


def test_a_model_of_transformers_has_a_task_and_its_settings() -> None:
    moods = Transformers(weights="./w", task="embedding", pooling="cls")
    assert dict(moods.settings) == {"weights": "./w", "task": "embedding", "pooling": "cls"}
    assert repr(moods) == "Transformers(weights='./w', task='embedding', pooling='cls')"
    with pytest.raises(TypeError, match="needs weights"):
        Transformers(task="embedding")
    with pytest.raises(TypeError, match="did you mean 'pooling'"):
        Transformers(weights="./w", task="embedding", poling="cls")


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ({}, "needs a task", "text-classification, embedding"),
        ({"task": "rerank"}, "no such task", "did you mean 'reranking'?"),
        ({"task": "reranking", "pooling": "cls"}, "has no setting 'pooling'", "max_tokens"),
        ({"task": "image-classification", "max_tokens": 4}, "has no setting 'max_tokens'", "none of its own"),
        ({"task": "embedding", "max_tokens": 0}, "max_tokens=0", ""),
        ({"task": "embedding", "pooling": "sum"}, "no such pooling", "mean"),
        ({"task": "embedding", "normalize": 1}, "normalize=1", ""),
    ],
)
def test_a_task_that_is_not_there_or_lacks_a_setting_is_refused(settings: Any, said: str, hint: str) -> None:
    with pytest.raises(InvalidSpec, match=said) as refused:
        Transformers(weights="./w", **settings)
    assert hint in refused.value.hint


def test_a_layered_class_says_how_its_layers_are_named() -> None:
    @function(weights="./w", layers="features.{}")
    class Model(Layered): ...

    assert settings_of(Model) == {"weights": "./w", "layers": "features.{}"}
    assert Model().after(3) == 3
    Model().load({})
    with pytest.raises(NotImplementedError, match="Model has no layer"):
        Model().layer({}, 0)


@pytest.mark.parametrize("target", [len, LLM, int])
def test_what_is_not_layered_takes_no_layers(target: Any) -> None:
    with pytest.raises(TypeError, match="needs a Layered class"):
        function(layers="features.{}")(target)


def test_a_bare_decorator_declares_with_no_settings() -> None:
    @function
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == 4
    assert settings_of(double) == {}


def test_a_declared_class_can_be_made_and_subclassed() -> None:
    @function(weights="./w", concurrency=2)
    class Embed:
        def __call__(self, request: Any) -> Any:
            return request

    class Better(Embed):
        pass

    assert Embed()(1) == Better()(1) == 1
    assert settings_of(Embed) == {"weights": "./w", "concurrency": 2}


def test_an_app_is_given_back_even_if_it_takes_no_attribute() -> None:
    class App:
        __slots__ = ()

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    app = App()
    assert function(memory="1GiB")(app) is app


def test_an_llm_keeps_its_settings() -> None:
    chat = LLM(weights="./w", dtype="bf16", threads=2)
    assert settings_of(chat) == dict(chat.settings) == {"weights": "./w", "dtype": "bf16", "threads": 2}
    assert repr(chat) == "LLM(weights='./w', dtype='bf16', threads=2)"


def test_a_misspelt_setting_is_refused_with_the_right_one() -> None:
    with pytest.raises(TypeError, match="no setting 'wieghts': did you mean 'weights'"):
        function(wieghts="./w")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="no setting 'max_bacth': did you mean 'max_batch'"):
        LLM(weights="./w", max_bacth=1)
    with pytest.raises(TypeError, match="'dtype'"):
        function(dtype="fp32")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="it takes name, weights"):
        function(zzz=1)  # type: ignore[call-overload]


def test_an_llm_needs_weights() -> None:
    with pytest.raises(TypeError, match="needs weights"):
        LLM(dtype="fp32")


def test_what_cannot_be_called_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="got int 3"):
        function(memory="1GiB")(3)


def test_a_declaration_loads_neither_torch_nor_a_server() -> None:
    code = (
        "import sys, fleetstart.runtime\n"
        "print([m for m in ('torch', 'uvicorn', 'starlette', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
