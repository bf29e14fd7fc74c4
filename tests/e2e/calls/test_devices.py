"""Functions on the CPU devices of a whole system: asked for, placed, bound, given back; too little memory is made up
for."""

from __future__ import annotations

import json

import pytest

from fleetstart.runtime.contract.sizes import MIB
from tests.e2e.calls.test_chat import EXAMPLE, SHORT
from tests.e2e.systems import System
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", "container", why="functions inside gVisor have no devices")

BOUND = """
import os
from fleetstart.runtime import Scale, function

@function(gpu="{gpu}", memory="48MiB", scale=Scale(max=1, keep_alive_s=1))
class {name}:
    def load(self, weights):
        self.held = bytearray({held} << 20)

    def __call__(self):
        return {{"device": os.environ["FS_WORKER_DEVICES"], "cores": sorted(os.sched_getaffinity(0))}}
"""


def reserved(system: System) -> dict[str, int]:
    (node,) = system.status().nodes
    return {device.id: device.reserved_bytes for device in node.devices}


def test_a_function_computes_on_its_device_until_it_ends(system: System) -> None:
    system.deploy(BOUND.format(gpu="cpu", name="Whole", held=1), name="whole")
    system.fs("scale", "whole", "--keep-alive", "600")
    answer = system.ok("whole")
    (node,) = system.status().nodes
    device = next(device for device in node.devices if device.id == answer["device"])
    assert answer["cores"] == list(device.cores)
    wait_until(lambda: reserved(system)[device.id] == 1024 * MIB, what="the reservation in the node's report")
    assert f"{device.id}   cpu   reserved 1.0 GiB of 1.0 GiB" in system.fs("nodes").out
    (row,) = wait_until(lambda: [row for row in system.invocations() if row.function == "whole"], what="its row")
    assert (row.device_type, row.device_bytes) == ("cpu", 1024 * MIB)
    assert "DEVICE GiB-s" in system.fs("usage", "whole").out
    system.fs("scale", "whole", "--reset")
    wait_until(lambda: not any(reserved(system).values()), what="the end of the reservation")


def test_a_worker_that_lacks_device_memory_is_started_with_more(system: System) -> None:
    """128 MiB are too little for it; the next one gets a quarter more, and so on."""
    system.deploy(BOUND.format(gpu="128MiB", name="Hungry", held=140), name="hungry", options=("--no-probe",))
    assert system.ok("hungry", timeout_s=60)["device"] in ("cpu:0", "cpu:1")
    lines = [line.text for line in system.logs("hungry")]
    assert any("out of device memory: the worker had 128 MiB of cpu:" in line for line in lines), lines


def test_devices_that_no_node_has_are_refused_with_those_that_there_are(system: System) -> None:
    handler = system.source(BOUND.format(gpu="H100:2", name="Never", held=1), folder="never")
    error = system.refused(handler)
    assert error.code == "invalid_spec"
    assert "asks for 2 H100 devices (gpu='H100:2'), which no node has" in error.message
    assert "has 2 × cpu of 1 GiB" in error.message


def test_a_language_model_answers_from_its_share_of_a_device_whose_rate_is_learned(system: System) -> None:
    if not (EXAMPLE / "weights" / "model.safetensors").exists():
        pytest.skip("examples/chat/weights is not there: `make models` makes it")
    system.deploy_file(
        EXAMPLE / "handler.py", "--name", "boxed", "--gpu", "900MiB", "--keep-alive", "600", "--no-probe"
    )
    answer = system.call("boxed", {"prompt": SHORT["prompt"], "max_tokens": 4}, timeout_s=60)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: sorted(reserved(system).values()) == [0, 900 * MIB], what="its share in the node's report")
    wait_until(
        lambda: any(device.load_bytes_per_s > 0 for node in system.status().nodes for device in node.devices),
        what="the rate of its load in the node's report",
    )
    told = system.call("boxed", {"prompt": "Once upon a time", "max_tokens": 8}, timeout_s=60)
    assert told.json()["usage"]["completion_tokens"] > 1, told.text
    wait_until(
        lambda: any(device.decode_bytes_per_s > 0 for node in system.status().nodes for device in node.devices),
        what="the device's compute speed in the node's report",
    )
    shown = json.loads(system.fs("nodes", "--json").out)
    assert "decode_bytes_per_s" in json.dumps(shown)
    assert "decodes" in system.fs("nodes").out
    system.fs("scale", "boxed", "--keep-alive", "1")
    wait_until(lambda: not any(reserved(system).values()), what="the end of the reservation")
