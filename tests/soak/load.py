"""Load of a soak: calls of every kind at a bounded rate, from one thread each, and deploys now and then."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
from safetensors.torch import save_file

from tests.e2e.systems import System
from tests.runtime.llm import models

ASYNC_TTL_S = 60
HANDLER = """
import os
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=4, scale=Scale(max=2, keep_alive_s=600))
def echo(text: str = ""):
    print("echo", len(text))
    return {"text": text}

@function(memory="64MiB", scale=Scale(max=1, keep_alive_s=1))
def cold():
    return os.getpid()

@function(memory="64MiB", concurrency=4, scale=Scale(max=1, keep_alive_s=600))
def ticks(count: int = 5):
    yield from range(count)

@function(memory="64MiB", scale=Scale(max=1, keep_alive_s=600))
def fails():
    raise ValueError("as it should")
"""
MODEL = """
from fleetstart.runtime import LLM, Scale

model = LLM(
    name="model", weights="./weights", dtype="fp32", threads=1, max_batch=4, max_context=512, memory="192MiB",
    kv_memory="16MiB", scale=Scale(max=1, keep_alive_s=600),
)
"""
PATHS = ("/api/v1/status", "/metrics", "/api/v1/invocations?limit=20", "/api/v1/usage?by=function", "/readyz")


class Load:
    """Operations in turn, each at its share of the rate."""

    def __init__(self, system: System, *, per_s: float, deploy_every_s: float, model: bool) -> None:
        self._system = system
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        shares: list[tuple[str, Callable[[httpx.Client], None], float]] = [
            ("call", self._call, 0.4),
            ("idempotent", self._idempotent, 0.1),
            ("stream", self._stream, 0.1),
            ("async", self._async, 0.1),
            ("error", self._error, 0.05),
            ("read", self._read, 0.15),
            ("cut", self._cut, 0.05),
            ("model", self._model, 0.05 if model else 0.0),
        ]
        works = [(name, work, 1 / (share * per_s)) for name, work, share in shares if share]
        works += [("cold", self._cold, 10.0), ("deploy", self._deploy, deploy_every_s)]
        self._threads = [threading.Thread(target=self._every, args=each, name=each[0]) for each in works]

    def prepare(self, model: bool) -> None:
        source = self._system.source(HANDLER, folder="soak")
        self._system.deploy_file(source, "--no-probe")
        if model:
            folder = self._system.root / "src" / "model"
            (folder / "weights").mkdir(parents=True)
            weights = models.tiny()
            save_file(dict(weights), folder / "weights" / "model.safetensors")
            for file in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
                (folder / "weights" / file).write_bytes(weights.file(file))
            self._system.deploy_file(_written(folder / "handler.py", MODEL), "--no-probe")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)

    @property
    def calls(self) -> int:
        return self.done.total() - self.done["read"] - self.done["deploy"]

    def _every(self, name: str, work: Callable[[httpx.Client], None], pause_s: float) -> None:
        with httpx.Client(base_url=self._system.url, trust_env=False, timeout=60) as http:
            while not self._stop.wait(pause_s):
                try:
                    work(http)
                except Exception as error:
                    at = time.strftime("%H:%M:%S")
                    self.wrong.append(f"{at} {name}: {type(error).__name__}: {str(error)[:300]}")
                self.done[name] += 1

    # ── operations ─────────────────────────────────────────────────────────────────────────────────

    def _call(self, http: httpx.Client) -> None:
        text = "x" * (next(self._numbers) % 2000)
        _check(http.post("/fn/echo", json={"text": text}), {"text": text})

    def _idempotent(self, http: httpx.Client) -> None:
        headers = {"idempotency-key": secrets.token_hex(8)}
        answers = [http.post("/fn/echo", json={"text": "same"}, headers=headers) for _ in range(2)]
        for answer in answers:
            _check(answer, {"text": "same"})
        assert answers[1].headers.get("idempotent-replayed") == "true"

    def _stream(self, http: httpx.Client) -> None:
        answer = http.post("/fn/ticks", json={"count": 5})
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert data[:5] == list("01234"), answer.text

    def _async(self, http: httpx.Client) -> None:
        headers = {"prefer": "respond-async", "fs-ttl-s": str(ASYNC_TTL_S)}
        answer = http.post("/fn/echo", json={"text": "later"}, headers=headers)
        assert answer.status_code == 202, answer.text
        where = f"/api/v1/invocations/{answer.headers['x-request-id']}"
        info = http.get(where, headers={"prefer": "wait=30"}).json()
        assert info["status"] == "succeeded", info

    def _error(self, http: httpx.Client) -> None:
        answer = http.post("/fn/fails", json={})
        assert answer.status_code == 500, answer.text

    def _read(self, http: httpx.Client) -> None:
        http.get(PATHS[next(self._numbers) % len(PATHS)]).raise_for_status()

    def _cut(self, http: httpx.Client) -> None:
        """A client that goes away in the middle of a stream."""
        with http.stream("POST", "/fn/ticks", json={"count": 100_000}) as answer:
            next(answer.iter_lines())

    def _cold(self, http: httpx.Client) -> None:
        _check(http.post("/fn/cold", json={}), None)

    def _model(self, http: httpx.Client) -> None:
        body = {"model": "model", "prompt": f"{next(self._numbers)} tokens", "max_tokens": 16, "ignore_eos": True}
        answer = http.post("/fn/model/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    def _deploy(self, http: httpx.Client) -> None:
        text = HANDLER.replace("def echo", f"# {next(self._numbers)}\ndef echo")
        self._system.deploy_file(self._system.source(text, folder="soak"), "--no-probe")


def _check(answer: httpx.Response, expected: object) -> None:
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    assert expected is None or msgspec.json.decode(answer.content) == expected, answer.text


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
