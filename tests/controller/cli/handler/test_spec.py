from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest

from fleetstart.controller.cli.handler.source.declarations import Declaration, Kind
from fleetstart.controller.cli.handler.spec import (
    adapter_of,
    adapters_of,
    build_spec,
    default_name,
    include_of,
    module_name,
    preload_of,
    tensor_parallel_of,
    weights_of,
)
from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.spec import SLO, FunctionSpec, Scale
from fleetstart.runtime.contract.ids import BundleId, CheckpointId
from fleetstart.runtime.contract.sizes import GIB, MIB


def declared(kind: Kind = "function", attribute: str = "f", **settings: Any) -> Declaration:
    return Declaration(attribute=attribute, kind=kind, line=3, settings=settings)


def spec_of(declaration: Declaration, imports: set[str] | None = None, **overrides: Any) -> FunctionSpec:
    weights = CheckpointId("c" * 64) if declaration.kind in ("llm", "layered") else None
    return build_spec(
        declaration,
        module="handler",
        bundle=BundleId("b" * 64),
        weights=weights,
        imports=imports or set(),
        overrides=overrides,
    )


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("hello", "hello"),
        ("mini_lm_embed", "mini-lm-embed"),
        ("MiniLMEmbed", "mini-lm-embed"),
        ("Embed2D", "embed2-d"),
        ("_private_", "private"),
        ("HTTPServer", "http-server"),
    ],
)
def test_default_name_is_kebab_case(attribute: str, name: str) -> None:
    assert default_name(attribute) == name


def test_defaults_of_a_function() -> None:
    spec = spec_of(declared(attribute="Hello"))
    assert (spec.name, spec.entry, spec.profile, spec.llm) == ("hello", "handler:Hello", "python", None)
    assert (spec.memory_bytes, spec.concurrency) == (512 * MIB, 1)


def test_defaults_of_an_llm_follow_its_batch() -> None:
    spec = spec_of(declared("llm", weights="w", max_batch=4, max_context=512, kv_memory="64MiB"))
    assert spec.llm is not None
    assert (spec.profile, spec.memory_bytes, spec.concurrency) == ("torch", 2 * GIB, 8)
    assert (spec.llm.max_batch, spec.llm.max_context_tokens, spec.llm.kv_memory_bytes) == (4, 512, 64 * MIB)


@pytest.mark.parametrize(
    ("settings", "kv_bytes", "dtype"),
    [
        ({}, 256 * MIB, "fp32"),
        ({"gpu": 1}, 0, "auto"),
        ({"gpu": "cpu:1GiB"}, 256 * MIB, "fp32"),
        ({"gpu": "24GiB", "kv_memory": "1GiB", "dtype": "bf16"}, GIB, "bf16"),
        ({"kv_memory": "auto"}, 0, "fp32"),
    ],
)
def test_on_a_gpu_weights_stay_as_they_are_and_the_cache_has_what_they_leave(
    settings: dict[str, Any], kv_bytes: int, dtype: str
) -> None:
    spec = spec_of(declared("llm", weights="w", **settings))
    assert spec.llm is not None
    assert (spec.llm.kv_memory_bytes, spec.llm.dtype) == (kv_bytes, dtype)


def test_a_model_that_is_split_asks_for_as_many_devices() -> None:
    spec = spec_of(declared("llm", weights="w", tensor_parallel_size=2))
    assert spec.llm is not None
    assert (str(spec.gpu), spec.llm.tensor_parallel_size, spec.in_layers) == ("2", 2, False)
    assert str(spec_of(declared("llm", weights="w", tensor_parallel_size=2, gpu="H100:2")).gpu) == "H100:2"
    assert spec_of(declared("llm", weights="w")).gpu is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gpu": 1}, "needs 2 whole devices, and gpu asks for '1'"),
        ({"gpu": "24GiB"}, "needs 2 whole devices, and gpu asks for '24GiB'"),
        ({"scale": {"standby_s": 5.0}}, "split over devices does not stand by"),
        ({"network": True}, "connect on a loopback of their own"),
        ({"engine": "transformers"}, "tensor_parallel_size is of the native engine alone"),
        ({"isolation": "container"}, "needs namespaces, and isolation is container"),
        ({"tensor_parallel_size": 17}, "must be 1 to 16 devices, got 17"),
    ],
)
def test_what_does_not_go_with_a_split_is_refused(settings: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"weights": "w", "tensor_parallel_size": 2, **settings}
    with pytest.raises(InvalidSpec, match=reason):
        spec_of(declared("llm", **fields))


@pytest.mark.parametrize("size", [0, 17, True, "2", 1.5])
def test_a_size_that_is_no_number_of_devices_is_named(size: object) -> None:
    with pytest.raises(InvalidSpec, match=f"tensor_parallel_size={size!r} is no number of devices from 1 to 16"):
        tensor_parallel_of(declared("llm", weights="w", tensor_parallel_size=size))


def test_an_llm_of_another_engine_computes_in_the_dtype_of_its_weights() -> None:
    native = spec_of(declared("llm", weights="w"))
    other = spec_of(declared("llm", weights="w", engine="transformers"))
    assert native.llm is not None
    assert other.llm is not None
    assert (native.llm.engine, native.llm.dtype, native.preload, native.in_layers) == ("native", "fp32", "", True)
    assert (other.llm.engine, other.llm.dtype) == ("transformers", "auto")
    assert (other.preload, other.in_layers) == ("transformers", False)
    assert spec_of(declared("llm", weights="w", engine="vllm")).preload == "vllm"
    named = spec_of(declared("llm", weights="w", engine="transformers", dtype="bf16"))
    assert named.llm is not None
    assert named.llm.dtype == "bf16"
    with pytest.raises(InvalidSpec, match="engine='tgi' is none of"):
        spec_of(declared("llm", weights="w", engine="tgi"))


def test_an_llm_with_two_engines_starts_in_one_worker_from_the_process_of_the_second_one() -> None:
    spec = spec_of(declared("llm", weights="w", engine="vllm", first="native"))
    assert spec.llm is not None
    assert (spec.llm.engine, spec.llm.first, spec.llm.dtype) == ("vllm", "native", "auto")
    assert (spec.preload, spec.in_layers) == ("vllm", False)
    with pytest.raises(InvalidSpec, match="the engine is 'native'"):
        spec_of(declared("llm", weights="w", engine="native", first="native"))


@pytest.mark.parametrize(("kind", "retries"), [("function", 0), ("transformers", 0), ("llm", 2), ("layered", 2)])
def test_calls_of_models_that_run_as_pipelines_are_repeated_unasked(kind: Kind, retries: int) -> None:
    more = {"task": "embedding"} if kind == "transformers" else {}
    assert spec_of(declared(kind, weights="w", **more)).retries == retries
    assert spec_of(declared(kind, weights="w", retries=1, **more)).retries == 1


def test_defaults_of_a_model_of_transformers() -> None:
    spec = spec_of(declared("transformers", weights="w", task="embedding", max_tokens=9))
    assert (spec.profile, spec.memory_bytes, spec.concurrency) == ("torch", 2 * GIB, 16)
    speech = spec_of(declared("transformers", weights="w", task="automatic-speech-recognition"))
    assert speech.concurrency == 1, "one call at a time"
    assert spec_of(declared("transformers", weights="w", task="embedding", concurrency=3)).concurrency == 3


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_what_imports_torch_starts_from_a_process_that_has_it(package: str) -> None:
    assert spec_of(declared(), {"json", package}).profile == "torch"


def test_what_imports_transformers_is_forked_from_a_process_that_has_it() -> None:
    ours = declared("transformers", weights="w", task="embedding")
    assert spec_of(ours).preloaded_pool == "torch:transformers"
    assert spec_of(declared(), {"sentence_transformers"}).preloaded_pool == "torch:transformers"
    assert spec_of(declared(), {"torch"}).preloaded_pool == "torch"
    assert spec_of(declared(isolation="gvisor"), {"transformers"}).preloaded_pool == "torch+gvisor"


def test_a_function_with_packages_of_its_own_is_forked_from_a_process_without_the_library() -> None:
    ours = declared("transformers", weights="w", task="embedding", requirements=["transformers"])
    assert preload_of(ours, set()) == "transformers"
    assert preload_of(ours, set(), ["transformers", "regex"]) == ""
    assert preload_of(declared(), {"transformers"}, ["PIL"]) == ""


def test_an_slo_comes_through_and_one_that_is_none_is_refused() -> None:
    assert spec_of(declared("llm", weights="w", slo=SLO(ttft_s=2, tpot_s=0.2))).slo == SLO(ttft_s=2, tpot_s=0.2)
    assert spec_of(declared()).slo is None
    with pytest.raises(InvalidSpec, match="slo"):
        spec_of(declared(slo=2))


def test_an_adapter_is_a_checkpoint_of_its_own() -> None:
    declaration = declared("llm", weights="w", adapter="a")
    spec = build_spec(
        declaration, module="handler", bundle=BundleId("b" * 64), weights=CheckpointId("c" * 64),
        adapter=CheckpointId("d" * 64), imports=set(), overrides={},
    )  # fmt: skip
    assert (spec.weights, spec.adapter) == ("c" * 64, "d" * 64)
    assert spec_of(declaration).adapter is None


def test_named_adapters_are_checkpoints_by_name() -> None:
    declaration = declared("llm", weights="w", adapters={"sql": "./a", "legal": "./b"})
    assert adapters_of(declaration) == {"sql": "./a", "legal": "./b"}
    assert adapters_of(declared("llm", weights="w")) == {}
    spec = build_spec(
        declaration, module="handler", bundle=BundleId("b" * 64), weights=CheckpointId("c" * 64),
        adapters={"sql": CheckpointId("e" * 64), "legal": CheckpointId("d" * 64)}, imports=set(), overrides={},
    )  # fmt: skip
    assert spec.checkpoints == ["c" * 64, "d" * 64, "e" * 64]
    for wrong in ("./a", {"sql": 3}, {"sql": ""}, ["./a"]):
        with pytest.raises(InvalidSpec, match="no names with paths"):
            adapters_of(declared("llm", weights="w", adapters=wrong))


def test_torch_anywhere_in_the_bundle_chooses_its_fork_server() -> None:
    assert spec_of(declared(), {"json", "torch"}).profile == "torch"
    assert spec_of(declared(), {"json", "torchlike"}).profile == "python"


def test_a_region_is_a_name_or_several() -> None:
    assert spec_of(declared(region="eu")).region == ["eu"]
    assert spec_of(declared(region=["eu", "us-east-1"])).region == ["eu", "us-east-1"]
    assert spec_of(declared(region="eu"), region=["us"]).region == ["us"]


def test_a_sandbox_has_a_pool_of_its_own_and_its_model_stays_whole() -> None:
    assert spec_of(declared()).pool == "python"
    shut = spec_of(declared("llm", weights="w", isolation="gvisor"))
    assert (shut.pool, shut.in_layers) == ("torch+gvisor", False)
    assert spec_of(declared("llm", weights="w")).in_layers


def test_flags_win_over_the_file_setting_by_setting() -> None:
    declaration = declared(name="a", memory="1GiB", scale=Scale(max=8, keep_alive_s=5))
    spec = spec_of(declaration, name="b", scale={"max": 2})
    assert (spec.name, spec.memory_bytes, spec.scale) == ("b", GIB, Scale(max=2, keep_alive_s=5))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"memory": "lots"}, "size 'lots' is not understood"),
        ({"memory": 1}, "memory must be"),
        ({"concurrency": "2"}, "concurrency"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"region": 1}, "region"),
        ({"region": "EU West"}, "region 'EU West' is not allowed"),
        ({"region": ["eu"] * 17}, "region has 16 names at most"),
        ({"network": 1}, "network"),
        ({"network": "api.example.com"}, "network"),
        ({"network": ["https://api.example.com/v1"]}, "is a URL"),
        ({"isolation": "chroot"}, "isolation"),
        (
            {"isolation": "gvisor", "network": ["api.example.com"]},
            "needs namespaces or a container, and isolation is gvisor",
        ),
        ({"isolation": "gvisor", "gpu": 1}, "devices need namespaces or a container, and isolation is gvisor"),
        ({"image": "app:1"}, "an image needs a container, and isolation is namespaces"),
        ({"image": "app:1", "isolation": "gvisor"}, "an image needs a container, and isolation is gvisor"),
        ({"image": "App Two", "isolation": "container"}, "is no name of an image"),
        ({"image": "app:", "isolation": "container"}, "is no name of an image"),
        ({"env": {"A": 1}}, "env"),
        ({"name": "Not Allowed"}, "'Not Allowed' is not allowed"),
        ({"scale": 3}, "scale"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        spec_of(declared(**settings))


@pytest.mark.parametrize(("settings", "says"), [({"dtype": "int4"}, "dtype"), ({"max_context": 1}, "max_context")])
def test_an_engine_setting_of_the_wrong_kind_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        spec_of(declared("llm", weights="w", **settings))


def test_paths_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="not a path"):
        weights_of(declared(weights=3))
    with pytest.raises(InvalidSpec, match="not a list of patterns"):
        include_of(declared(include="*.txt"))
    with pytest.raises(InvalidSpec, match="adapter=3 is not a path"):
        adapter_of(declared(weights="w", adapter=3))
    with pytest.raises(InvalidSpec, match="needs the weights that it adapts"):
        adapter_of(declared(adapter="./lora"))
    assert adapter_of(declared(weights="w", adapter="./lora")) == "./lora"
    assert adapter_of(declared(weights="w")) is None
    assert weights_of(declared()) is None
    assert include_of(declared()) == []


@pytest.mark.parametrize("name", ["my-handler.py", "handler.txt", "1.py"])
def test_a_file_that_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match="cannot be imported"):
        module_name(PurePath(name))
