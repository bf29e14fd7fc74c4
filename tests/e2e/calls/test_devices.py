"""Functions on the CPU devices of a whole system: asked for, placed, bound, given back; too little memory is made up
for."""

from __future__ import annotations

from fleetstart.runtime.contract.sizes import MIB
from tests.e2e.systems import System
from tests.servers import wait_until

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
    wait_until(lambda: reserved(system)[device.id] == 512 * MIB, what="the reservation in the node's report")
    assert f"{device.id}   cpu   reserved 512.0 MiB of 512.0 MiB" in system.fs("nodes").out
    (row,) = wait_until(lambda: [row for row in system.invocations() if row.function == "whole"], what="its row")
    assert (row.device_type, row.device_bytes) == ("cpu", 512 * MIB)
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
    assert "has 2 × cpu of 0.5 GiB" in error.message
