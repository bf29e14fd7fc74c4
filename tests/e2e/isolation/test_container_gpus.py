"""A container gets what its engine's specification says belongs to a GPU (Container Device Interface).

The specification is of a stand-in: a device file that opens, a file in the place of the driver's library, a variable.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.runtime.launch.container_engine import ContainerEngine, ContainerPlan, EngineError
from tests.engine import DockerEngine, docker_engine
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="it speaks to an engine itself")

LIBRARY = "/usr/lib/libcuda.so.1"
PROGRAM = f"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void) {{
  char library[32] = "";
  FILE* file = fopen("{LIBRARY}", "r");
  if (file) fgets(library, sizeof library, file);
  printf("%d %d %d %s %s\\n", fopen("/dev/nvidia0", "r+") != NULL, access("/dev/nvidia1", F_OK) == 0, getuid(),
         getenv("NVIDIA_STAND_IN"), library);
}}
"""
USER = 65534
DOWNLOADED = Path(__file__).parents[3] / "build" / "docker-with-cdi"


def specification(folder: Path) -> dict[str, object]:
    library = folder / "libcuda.so.1"
    library.write_text("of-the-node")
    mount = {"hostPath": str(library), "containerPath": LIBRARY, "options": ["ro", "bind"]}
    nodes = {name: [{"path": f"/dev/{name}", "hostPath": "/dev/zero"}] for name in ("nvidia0", "nvidia1")}
    devices = [
        {"name": name.replace("nvidia", "GPU-"), "containerEdits": {"deviceNodes": node}}
        for name, node in nodes.items()
    ]
    edits = {"env": ["NVIDIA_STAND_IN=yes"], "mounts": [mount]}
    return {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": edits}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    """An engine with the specification and an image of one program."""
    dockerd = _dockerd_with_cdi()
    folder = tmp_path_factory.mktemp("cdi")
    (folder / "specifications").mkdir()
    (folder / "specifications" / "nvidia.json").write_text(json.dumps(specification(folder)))
    (folder / "daemon.json").write_text('{"features": {"cdi": true}}')
    root = folder / "root"
    for name in ("dev", "etc", "proc", "tmp", "usr/lib"):
        (root / name).mkdir(parents=True)
    compiler = ["gcc", "-static", "-x", "c", "-", "-o", str(root / "look")]
    subprocess.run(compiler, input=PROGRAM, text=True, check=True, timeout=60)
    image = shutil.make_archive(str(folder / "image"), "tar", root)
    options = ("--config-file", str(folder / "daemon.json"), "--cdi-spec-dir", str(folder / "specifications"))
    with docker_engine(dockerd=dockerd, options=options) as engine:
        engine.docker("import", image, "look:1")
        yield engine


def test_it_has_the_device_the_library_and_the_variable_of_its_own_gpu(engine: DockerEngine) -> None:
    client = ContainerEngine(engine.address)
    made = client.create(plan("look", "GPU-0"))
    try:
        client.start(made)
        said = wait_until(lambda: engine.docker("logs", "look").strip(), 20, what="what it sees")
    finally:
        client.remove(made)
    assert said == f"1 0 {USER} yes of-the-node"


def test_a_gpu_that_the_specification_does_not_name_is_refused_with_its_name(engine: DockerEngine) -> None:
    client = ContainerEngine(engine.address)
    made = client.create(plan("none", "GPU-7"))
    try:
        with pytest.raises(EngineError, match=r"(?i)cdi.*GPU-7"):
            client.start(made)
    finally:
        client.remove(made)


def plan(name: str, gpu: str) -> ContainerPlan:
    return ContainerPlan(
        name=name, image="look:1", command=("/look",), environment={}, user=USER, shown=(), node="n", launcher="l",
        gpus=(gpu,),
    )  # fmt: skip


def _dockerd_with_cdi() -> str:
    """The machine's own, or that of `make docker-with-cdi`."""
    said = []
    for path in filter(None, (shutil.which("dockerd"), shutil.which("dockerd", path=str(DOWNLOADED)))):
        said.append(subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout.strip())
        version = re.search(r"version (\d+)", said[-1])
        if version is not None and int(version[1]) >= 25:
            return path
    pytest.skip(f"needs Docker 25 or later, which knows CDI (make docker-with-cdi): {said or 'there is none'}")
