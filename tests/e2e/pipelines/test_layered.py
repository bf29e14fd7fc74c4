"""Layered models of a user's own on real hosts: they start as a pipeline, become one worker, and lose stages."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.pipelines.fleet import Fleet, Function, function_name

pytestmark = [
    pytest.mark.bed,
    pytest.mark.isolations("namespaces", why="pipelines over several nodes are of functions in namespaces"),
]

LAYERS, WIDTH = 6, 700
"""2 MB a layer."""
LAYER_S = 0.1
"""Calls must last until something can be done to them."""
HANDLER = """
import time

import torch
from fleetstart.runtime import Layered, Scale, function


@function(
    name={name!r}, weights="./weights", layers="part_{{}}", memory="192MiB", timeout_s=30,
    scale=Scale(max=1, keep_alive_s=600),
)
class Tower(Layered):
    def load(self, weights):
        self.stem = weights["stem"]

    def layer(self, weights, index):
        matrix = weights[f"part_{{index}}.matrix"]

        def run(activations):
            time.sleep({layer_s})
            if index == 4 and activations.isnan().any():
                raise ValueError(f"layer {{index}} does not like it")
            return torch.tanh(activations @ matrix)

        return run

    def before(self, number: float):
        return number * self.stem

    def after(self, activations):
        return activations[0, :8].tolist()
"""


class Tower(Function):
    """Deployed, and its weights here."""

    def __init__(self, fleet: Fleet, folder: Path, name: str) -> None:
        super().__init__(name, None)  # type: ignore[arg-type]
        made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = [torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for _ in range(LAYERS)]
        self._stem, self._layers = torch.randn(1, WIDTH, generator=made).abs(), noise
        (folder / "weights").mkdir(parents=True)
        tensors = {f"part_{index}.matrix": one for index, one in enumerate(noise)} | {"stem": self._stem}
        save_file(tensors, folder / "weights" / "model.safetensors")
        (folder / "handler.py").write_text(HANDLER.format(name=name, layer_s=LAYER_S))
        fleet.bed.fs("deploy", str(folder / "handler.py"), "--no-probe")
        shutil.rmtree(folder / "weights")
        self._bed = fleet.bed
        self._pool = ThreadPoolExecutor(8)

    def call(self, number: float) -> Future[httpx.Response]:
        def post() -> httpx.Response:
            return httpx.post(f"{self._bed.url}/fn/{self.name}", json={"number": number}, timeout=30, trust_env=False)

        return self._pool.submit(post)

    def check(self, number: float, called: Future[httpx.Response]) -> httpx.Response:
        """Checks that the answer is that of the whole model."""
        response = called.result(35)
        assert response.status_code == 200, response.text
        activations = number * self._stem
        for matrix in self._layers:
            activations = torch.tanh(activations @ matrix)
        assert response.json() == pytest.approx(activations[0, :8].tolist(), abs=1e-4)
        return response


@pytest.fixture
def tower(fleet: Fleet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tower]:
    """One that is cold everywhere."""
    tower = Tower(fleet, tmp_path / "tower", function_name(request))
    yield tower
    fleet.remove(tower)


def check_after(fleet: Fleet, tower: Tower) -> None:
    """One worker with the whole model is left, and answers at once."""
    fleet.settled(tower)
    assert tower.check(7, tower.call(7)).headers["fs-start"] == "hot"


def test_a_cold_start_is_a_pipeline_and_becomes_one_worker(fleet: Fleet, tower: Tower) -> None:
    calls = {number: tower.call(number) for number in (0.5, 1, 2, 3)}
    orders = fleet.pipeline(tower)
    assert [order.stage.cuts[0] for order in orders if order.stage is not None] == [(0, LAYERS // 3)] * 3
    for number, called in calls.items():
        assert tower.check(number, called).headers["fs-start"] == "cold"
    assert fleet.settled(tower).worker == orders[0].worker
    check_after(fleet, tower)


@pytest.mark.parametrize(("victim", "when"), [(1, "before"), (0, "calls")])
def test_a_stage_is_killed(fleet: Fleet, tower: Tower, victim: int, when: str) -> None:
    calls = {number: tower.call(number) for number in (0.5, 1, 2, 3)}
    orders = fleet.pipeline(tower)
    if when == "calls":
        fleet.reached(orders[0], "ready")
    fleet.kill(orders[victim])
    for number, called in calls.items():
        tower.check(number, called)
    check_after(fleet, tower)


def test_what_a_layer_on_another_host_raises_is_its_callers(fleet: Fleet, tower: Tower) -> None:
    bad = {"number": 3e38}  # more than fp32 holds, times the stem
    fine = tower.call(1)
    fleet.pipeline(tower)
    response = httpx.post(f"{fleet.bed.url}/fn/{tower.name}", json=bad, timeout=30, trust_env=False)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "handler_error"
    assert "layer 4 does not like it (handler.py:" in response.json()["error"]["message"]
    tower.check(1, fine)
    check_after(fleet, tower)
