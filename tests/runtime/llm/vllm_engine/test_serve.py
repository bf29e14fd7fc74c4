"""A plain `vllm serve` beside a node daemon: its weights come from the node's segment, and from no file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fleetstart.controller.cli.weights.publish import publish
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.llm.vllm_engine.node_segment import segment_weights
from tests.controller.cli.checkpoints import MemoryStore, no_progress
from tests.prefetcher.nodes import Node, Store
from tests.runtime.llm.models import REAL
from tests.servers import RedisServer, end, free_port, plain_environment, spawn, wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test"),
]

START_S = 300.0
GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"][0]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_PLUGINS": "fleetstart",
}


def test_vllm_serve_answers_with_the_weights_of_the_node(redis_server: RedisServer, tmp_path: Path) -> None:
    if not (REAL / "model.safetensors").exists():
        pytest.skip(f"no model in {REAL}: `make models` converts it")
    store = Store(tmp_path / "store")
    checkpoint = _published(store, tmp_path / "cache")
    sockets = tempfile.TemporaryDirectory(prefix="vllm-")  # a killed one leaves them; names of sockets must be short
    node = Node(redis_server, str(store.folder), tmp_path / "home").start()
    try:
        with segment_weights(node.home, checkpoint) as weights:
            weights.wait()
        for part in (store.folder / f"checkpoints/{checkpoint}").glob("*.safetensors"):
            part.unlink()  # from here on only the node's memory has them
        port = free_port()
        with (tmp_path / "vllm.log").open("wb") as log:
            serve = spawn(
                _command(_small_files(tmp_path / "model"), checkpoint, node.home, port),
                env=plain_environment() | ENVIRONMENT | {"VLLM_RPC_BASE_PATH": sockets.name},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(lambda: _answers(serve, port, tmp_path / "vllm.log"), START_S, what="vllm serve")
            assert _tokens(port) == GOLDEN["output_ids"][:8]
        finally:
            end(serve)
    finally:
        node.close()
        sockets.cleanup()


def _published(store: Store, cache: Path) -> CheckpointId:
    memory = MemoryStore()
    published = publish(REAL, memory, cache=cache, progress=no_progress)
    for key, content in memory.objects.items():
        store.put(key, content)
    return published.id


def _small_files(folder: Path) -> Path:
    """What vLLM reads of a model beside its weights."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((REAL / name).read_bytes())
    return folder


def _command(folder: Path, checkpoint: CheckpointId, home: Path, port: int) -> list[str | Path]:
    extra = json.dumps({"checkpoint": checkpoint, "home": str(home)})
    return [
        *(sys.executable, Path(sys.executable).parent / "vllm", "serve", folder),
        *("--load-format", "fleetstart", "--model-loader-extra-config", extra),
        *("--served-model-name", "chat", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def _answers(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
    except OSError:
        return False
    return True


def _tokens(port: int) -> list[int]:
    body = {
        "model": "chat", "prompt": GOLDEN["prompt_ids"], "max_tokens": 8, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
    return found
