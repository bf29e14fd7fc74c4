"""Functions in images of their users, on a real engine: what they find there, and what is said where it is not."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping

import pytest

from fleetstart.runtime.launch.container_engine import ContainerEngine, ContainerPlan, EngineError
from tests.containers.engine import DockerEngine, docker_engine
from tests.e2e.systems import System, error_in, running
from tests.servers import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.isolations("namespaces", why="its functions name their own isolation")]

HEAD = """
import os, sys
from fleetstart.runtime import Scale, function

"""
READS = """
@function(isolation="container", image="IMAGE", memory="64MiB", scale=Scale(max=2, keep_alive_s=600))
def NAME(how: str = ""):
    if how == "ends":
        os._exit(0)
    import greeter  # of the image
    return {
        "greeting": greeter.greet(open("/opt/data/name").read()),
        "variable": os.environ.get("GREETING"),
        "gpus": os.environ.get("NVIDIA_VISIBLE_DEVICES"),
        "sees": sorted(os.listdir("/")),
        "user": os.getuid(),
        "writes": [path for path in ("/opt/data", "/data", "/", "/run") if os.access(path, os.W_OK)],
        "data_is_memory": any(line.split()[1:3] == ["/data", "tmpfs"] for line in open("/proc/mounts")),
        "python": sys.executable,
    }
"""
FILES = {
    "opt/data/name": "Ada",
    "opt/lib/greeter.py": "def greet(name):\n    return f'Hello from the image, {name}!'\n",
}
CHANGES = (
    "ENV PYTHONPATH=/opt/lib GREETING=hello NVIDIA_VISIBLE_DEVICES=all",
    "VOLUME /data",
    'ENTRYPOINT ["/no/such/program"]',
    "USER 0",
)


def load_foreign(engine: DockerEngine, name: str, foreign: str) -> None:
    """An image as another one, but built for another processor."""
    saved, changed = engine.folder / "saved.tar", engine.folder / "changed.tar"
    engine.docker("save", "--output", str(saved), name)
    with tarfile.open(saved) as source, tarfile.open(changed, "w") as target:
        manifest = json.load(source.extractfile("manifest.json"))  # type: ignore[arg-type]
        for member in source:
            data = source.extractfile(member).read() if member.isfile() else b""  # type: ignore[union-attr]
            if member.name == manifest[0]["Config"]:
                data = json.dumps({**json.loads(data), "architecture": "s390x"}).encode()
            if member.name == "manifest.json":
                data = json.dumps([{**manifest[0], "RepoTags": [foreign]}]).encode()
            if member.name != "repositories":
                member.size = len(data)
                target.addfile(member, io.BytesIO(data))
    engine.docker("load", "--input", str(changed))


def import_image(
    engine: DockerEngine, name: str, *, changes: tuple[str, ...] = CHANGES, links: Mapping[str, str] | None = None
) -> None:
    """An image with two files, and without a Python, a shell or a C library. `links`: targets by path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, text in FILES.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(text), 0o644
            tar.addfile(member, io.BytesIO(text.encode()))
        for path, target in (links or {}).items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    file = engine.folder / "image.tar"
    file.write_bytes(packed.getvalue())
    asked = [word for change in changes for word in ("--change", change)]
    engine.docker("import", *asked, str(file), name)


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    """An engine that starts an init process in each container which does not say that it wants none."""
    with docker_engine(options=("--init",)) as engine:
        import_image(engine, "greeter:1")
        yield engine


@pytest.fixture(scope="module")
def system(engine: DockerEngine) -> Iterator[System]:
    settings = {"FS_PROFILES": "python,python+container", "FS_CONTAINER_ENGINE": engine.address, "FS_DEVICES": DEVICES}
    with running(env=settings) as system:
        wait_until(lambda: "python+container" in system.status().nodes[0].profiles, 60, what="a launcher of containers")
        yield system


DEVICES = "cpu:1x256MiB"


def test_a_function_reads_files_and_libraries_of_its_image_and_nothing_of_the_node(system: System) -> None:
    handler = system.source(HEAD + READS.replace("IMAGE", "greeter:1").replace("NAME", "greets"), folder="greets")
    assert "warning" not in system.fs("deploy", str(handler), "--no-probe").err, "imports are the image's"
    seen = system.ok("greets")
    assert seen["greeting"] == "Hello from the image, Ada!"
    assert seen["variable"] == "hello"
    assert seen["gpus"] == "void", "the runtime of the engine gives it none, whatever its image asks for"
    assert not {"usr", "lib", "home", "root"} & set(seen["sees"]), "the image has none, and the node's are not shown"
    assert seen["user"] >= 1000
    assert seen["writes"] == ["/data"]
    assert seen["data_is_memory"]
    assert seen["python"].startswith("/run/fleetstart-python/")
    assert ", image greeter:1\n" in system.fs("explain", "greets").out


def test_containers_of_an_image_wait_for_its_next_start(system: System, engine: DockerEngine) -> None:
    system.ok("greets")
    id = json.loads(engine.docker("image", "inspect", "greeter:1"))[0]["Id"].removeprefix("sha256:")

    def paused() -> list[str]:
        shown = engine.docker("ps", "--filter", "status=paused", "--format", "{{.Image}} {{.Names}}").splitlines()
        named = [line.split() for line in shown]
        return [name for image, name in named if image == "greeter:1" or id.startswith(image.removeprefix("sha256:"))]

    (waiting,) = wait_until(paused, 30, what="a paused container of the image")
    assert system.call("greets", {"how": "ends"}).status_code == 502
    assert system.ok("greets")["greeting"]
    assert waiting not in paused()


def test_another_image_under_the_same_name_is_noticed(system: System, engine: DockerEngine) -> None:
    import_image(engine, "greeter:1", changes=("ENV PYTHONPATH=/opt/lib GREETING=newer",))
    assert system.call("greets", {"how": "ends"}).status_code == 502
    assert system.ok("greets")["variable"] == "newer"


def test_an_image_without_what_the_function_imports_fails_its_calls_with_the_name(system: System) -> None:
    text = (
        READS.replace("IMAGE", "greeter:1").replace("NAME", "lacks").replace("import greeter", "import no_such_library")
    )
    system.deploy(HEAD + text, name="lacks")
    response = system.call("lacks")
    assert response.status_code == 500
    assert "no_such_library" in error_in(response).message


def test_an_image_that_is_not_on_the_engine_fails_the_deploy_and_says_how_to_load_it(system: System) -> None:
    handler = system.source(HEAD + READS.replace("IMAGE", "nowhere:1").replace("NAME", "absent"), folder="absent")
    error = system.refused(handler)
    assert "the image nowhere:1 is not on the engine of this node" in error.message + error.hint
    assert "docker load" in error.message + error.hint


def test_an_image_for_another_processor_is_refused_with_both(system: System, engine: DockerEngine) -> None:
    load_foreign(engine, "greeter:1", "foreign:1")
    handler = system.source(HEAD + READS.replace("IMAGE", "foreign:1").replace("NAME", "foreign"), folder="foreign")
    error = system.refused(handler)
    assert "the image foreign:1 is for s390x, and this node is" in error.message + error.hint


def test_an_image_with_a_link_in_the_place_of_tmp_is_refused_with_that_place(
    system: System, engine: DockerEngine
) -> None:
    """A link may lead to what the node has at that path, too."""
    import_image(engine, "linked:1", links={"tmp": "/opt/data"})
    handler = system.source(HEAD + READS.replace("IMAGE", "linked:1").replace("NAME", "linked"), folder="linked")
    error = system.refused(handler)
    assert "the image linked:1 has a symbolic link in the place of /tmp" in error.message + error.hint


def test_an_image_without_a_container_is_refused_at_the_deploy(system: System) -> None:
    text = READS.replace('isolation="container", ', "").replace("IMAGE", "greeter:1").replace("NAME", "plain")
    error = system.refused(system.source(HEAD + text, folder="plain"))
    assert "an image needs a container, and isolation is namespaces" in error.message
    assert 'isolation="container"' in error.hint


def test_an_engine_without_the_interface_of_devices_says_so(engine: DockerEngine) -> None:
    """The launcher takes this answer for the machine's, and says what it needs."""
    client = ContainerEngine(engine.address)
    plan = ContainerPlan(
        name="gpu", image="greeter:1", command=("/none",), environment={}, user=65534, shown=(), node="n", launcher="l",
        gpus=("GPU-1",),
    )  # fmt: skip
    made = client.create(plan)
    try:
        with pytest.raises(EngineError, match=r"(?i)cdi"):
            client.start(made)
    finally:
        client.remove(made)


def test_a_function_in_a_container_gets_its_cpu_device_and_no_gpu_by_the_engines_runtime(system: System) -> None:
    text = """
    @function(isolation="container", gpu="cpu", memory="64MiB", scale=Scale(max=1, keep_alive_s=600))
    def computes():
        names = ("FS_WORKER_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        return {"devices": [os.environ.get(name) for name in names], "cores": len(os.sched_getaffinity(0))}
    """
    system.deploy(HEAD + text.replace("\n    ", "\n"), name="computes")
    assert system.ok("computes") == {"devices": ["cpu:0", "void"], "cores": len(os.sched_getaffinity(0))}
