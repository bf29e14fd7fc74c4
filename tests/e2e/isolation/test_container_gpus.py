"""A container gets what its engine's specification says belongs to a GPU (Container Device Interface).

The specification is of a stand-in: a device file that opens, a file in the place of the driver's library, a variable.
Where there is a GPU, another one is of that: a program in a container computes on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.launch.container_engine import ContainerEngine, ContainerPlan, EngineError
from tests.containers.engine import DockerEngine, docker_engine
from tests.e2e.calls.test_gpus import HOLDS, reserved
from tests.e2e.systems import running
from tests.servers import wait_until

pytestmark = pytest.mark.isolations("namespaces", why="it speaks to an engine itself")

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
COMPUTES = """
#include <dlfcn.h>
#include <stdio.h>

#define CALL(name, ...) do { \\
    int (*call)() = (int (*)())dlsym(cuda, name); \\
    int code = call ? call(__VA_ARGS__) : -1; \\
    if (code) { printf("%s: %d\\n", name, code); return 1; } \\
  } while (0)

int main(void) {
  char name[64] = "";
  unsigned char numbers[4096] = {0};
  int device = 0;
  void* context = 0;
  unsigned long long memory = 0;
  unsigned long sum = 0;
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) { printf("%s\\n", dlerror()); return 1; }
  CALL("cuInit", 0);
  CALL("cuDeviceGet", &device, 0);
  CALL("cuDeviceGetName", name, (int)sizeof name, device);
  CALL("cuDevicePrimaryCtxRetain", &context, device);
  CALL("cuCtxSetCurrent", context);
  CALL("cuMemAlloc_v2", &memory, sizeof numbers);
  CALL("cuMemsetD8_v2", memory, (unsigned char)7, sizeof numbers);
  CALL("cuMemcpyDtoH_v2", numbers, memory, sizeof numbers);
  for (unsigned long at = 0; at < sizeof numbers; ++at) sum += numbers[at];
  printf("%s: %lu\\n", name, sum);
}
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
    folder = tmp_path_factory.mktemp("cdi")
    root = image_root(folder)
    compile_program(PROGRAM, root / "look", "-static")
    with engine_with(folder, specification(folder), root) as engine:
        yield engine


def image_root(folder: Path) -> Path:
    """Folder of an image without files."""
    root = folder / "root"
    for name in ("dev", "etc", "proc", "tmp", "usr/lib"):
        (root / name).mkdir(parents=True)
    return root


def compile_program(source: str, target: Path, *options: str) -> None:
    compiler = ["gcc", "-x", "c", "-", "-o", str(target), *options]
    subprocess.run(compiler, input=source, text=True, check=True, timeout=60)


@contextlib.contextmanager
def engine_with(folder: Path, about_gpus: dict[str, object], root: Path) -> Iterator[DockerEngine]:
    """An engine with a specification, and the image `look:1` of a folder."""
    dockerd = _dockerd_with_cdi()
    (folder / "specifications").mkdir()
    (folder / "specifications" / "nvidia.json").write_text(json.dumps(about_gpus))
    (folder / "daemon.json").write_text('{"features": {"cdi": true}}')
    image = shutil.make_archive(str(folder / "image"), "tar", root)
    options = ("--config-file", str(folder / "daemon.json"), "--cdi-spec-dir", str(folder / "specifications"))
    with docker_engine(dockerd=dockerd, options=options) as engine:
        engine.docker("import", image, "look:1")
        yield engine


def test_it_has_the_device_the_library_and_the_variable_of_its_own_gpu(engine: DockerEngine) -> None:
    assert output_of(engine, plan("look", "GPU-0")) == f"1 0 {USER} yes of-the-node"


def test_a_gpu_that_the_specification_does_not_name_is_refused_with_its_name(engine: DockerEngine) -> None:
    client = ContainerEngine(engine.address)
    made = client.create(plan("none", "GPU-7"))
    try:
        with pytest.raises(EngineError, match=r"(?i)cdi.*GPU-7"):
            client.start(made)
    finally:
        client.remove(made)


@pytest.mark.gpu
@NO_CUDA
def test_a_program_in_a_container_computes_on_a_real_gpu(tmp_path: Path) -> None:
    gpu, root = f"GPU-{torch.cuda.get_device_properties(0).uuid}", image_root(tmp_path)
    compile_program(COMPUTES, root / "look", "-std=gnu17")
    for library in libraries_of(root / "look", driver_library()):
        (root / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.relative_to("/"))
    with engine_with(tmp_path, specification_of_real(gpu), root) as engine:
        said = output_of(engine, plan("computes", gpu))
    assert said == f"{torch.cuda.get_device_name(0)}: {7 * 4096}"


@pytest.mark.gpu
@NO_CUDA
def test_a_function_in_a_container_computes_on_its_gpu_until_it_ends(tmp_path: Path) -> None:
    gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    with (
        engine_with(tmp_path, specification_of_real(gpu), image_root(tmp_path)) as engine,
        running(env={"FS_CONTAINER_ENGINE": engine.address, "FS_PROFILES": "torch+container"}) as system,
    ):
        handler = HOLDS.format(name="Held", share="4GiB", held=1, most=1)
        system.deploy(handler, name="held", options=("--isolation", "container"))
        answer = system.ok("held", timeout_s=120)
        assert answer == {"device": "cuda:0", "gpu": torch.cuda.get_device_name(), "last": 0}
        wait_until(lambda: reserved(system) == 4 * GIB, what="the reservation in the node's report")
        system.fs("rm", "held", "--yes")
        wait_until(lambda: not reserved(system), what="the end of the reservation")


def specification_of_real(gpu: str) -> dict[str, object]:
    """Specification of the first GPU, with what of nvidia-ctk's the driver's own interface needs."""
    library = driver_library()
    known = str(library.with_name("libcuda.so.1"))  # the file has the driver's version in its name
    mount = {"hostPath": str(library), "containerPath": known, "options": ["ro", "nosuid", "bind"]}
    paths = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    nodes = [{"path": path} for path in paths if Path(path).exists()]
    edits = {"deviceNodes": nodes, "mounts": [mount], "env": [f"LD_LIBRARY_PATH={library.parent}"]}
    devices = [{"name": gpu, "containerEdits": edits}]
    return {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}


def driver_library() -> Path:
    """File of the driver's library, wherever the machine has it."""
    ctypes.CDLL("libcuda.so.1")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if "/libcuda.so" in line)


def libraries_of(*programs: Path) -> set[Path]:
    """Libraries that the programs are linked with, as the loader finds them."""
    found = set()
    for program in programs:
        said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True, timeout=20).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", said)}
    return found


def output_of(engine: DockerEngine, container: ContainerPlan) -> str:
    """Output of a container's program."""
    client = ContainerEngine(engine.address)
    made = client.create(container)
    try:
        client.start(made)
        return wait_until(lambda: engine.docker("logs", container.name).strip(), 30, what=f"what {container.name} says")
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
