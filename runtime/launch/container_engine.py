"""Client of a container engine over the Docker API, which Podman's socket speaks, too.

Only what the launcher needs: an image from a tar, and containers without rights. Each thread has a client of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, LogConfig, Ulimit
from requests.exceptions import RequestException

from ..isolation.namespaces import OPEN_FILES_MAX
from ..isolation.root import Mount

NODE_LABEL = "fleetstart.node"
"""Label of each container: its node's folder, by which what a killed node left is found."""
LAUNCHER_LABEL = "fleetstart.launcher"
"""Label of each container: its launcher's folder. A launcher that ends removes none of its successor's."""
PIDS_MAX = 512
WRITABLE_BYTES = 64 << 20
"""Size of /tmp and of /dev/shm until a container has its function, whose memory then bounds them."""
WRITABLE_INODES = 16_384
API_TIMEOUT_S = 30.0
REMOVALS_AT_ONCE = 8
CONFLICT = 409
GPU_KIND = "nvidia.com/gpu"
"""Kind of devices in the specification that NVIDIA's container toolkit writes."""
EXIT_TIMEOUT_S = 10.0


class EngineError(OSError):
    """The engine refused a request, or does not answer."""


@dataclass(frozen=True, slots=True)
class UserImage:
    """An image of a user, as the engine has it now."""

    id: str
    architecture: str
    volumes: tuple[str, ...]
    """Paths that the image declares to be volumes: the engine would make each a folder on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """What a container is made of."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    user: int
    shown: tuple[Mount, ...]
    """Read-only mounts; without a source an empty folder."""
    node: str
    launcher: str
    network: bool = False
    volumes: tuple[str, ...] = ()
    """Volumes of its image, which get memory in place of a folder on the disk."""
    gpus: tuple[str, ...] = ()
    """GPUs that it sees, by their UUID."""


class ContainerEngine:
    """One engine, by the address of its API. Errors of all calls: EngineError."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._local = threading.local()
        self._podman: bool | None = None

    def is_podman(self) -> bool:
        """True if Podman answers at this address, which is asked once."""
        if self._podman is None:
            with self._told("tell what it is"):
                parts = self._api().version().get("Components") or ()
            self._podman = any("Podman" in str(one.get("Name")) for one in parts)
        return self._podman

    def version(self) -> str:
        with self._told("tell its version"):
            return str(self._api().version()["Version"])

    def ensure_image(self, tag: str, data: bytes) -> None:
        """Imports a tar as an image, unless the engine has it."""
        with self._told(f"import the image {tag}"):
            try:
                self._api().inspect_image(tag)
            except NotFound:
                self._api().import_image_from_data(data, repository=tag)  # Podman ignores a tag beside its name

    def find_image(self, name: str) -> UserImage | None:
        """A user's image by its name; None if the engine lacks it: nothing is pulled."""
        with self._told(f"look for the image {name}"):
            try:
                found = self._api().inspect_image(name)
            except NotFound:
                return None
        volumes = (found.get("Config") or {}).get("Volumes") or {}
        return UserImage(str(found["Id"]), str(found["Architecture"]), tuple(sorted(volumes)))

    def create(self, plan: ContainerPlan) -> str:
        """Creates a container, returns its id."""
        api = self._api()
        with self._told(f"create the container {plan.name}"):
            made = api.create_container(
                plan.image,
                entrypoint=list(plan.command),
                healthcheck={"Test": ["NONE"]},
                name=plan.name,
                hostname=plan.name,
                user=f"{plan.user}:{plan.user}",
                environment=dict(plan.environment),
                working_dir="/",
                labels={NODE_LABEL: plan.node, LAUNCHER_LABEL: plan.launcher},
                host_config=api.create_host_config(**host_settings(plan, podman=self.is_podman())),
            )
            return str(made["Id"])

    def start(self, container: str) -> int:
        """Starts a container, returns the pid of its first process."""
        with self._told(f"start the container {container[:12]}"):
            self._api().start(container)
            return int(self._api().inspect_container(container)["State"]["Pid"])

    def pause(self, container: str) -> None:
        with self._told(f"pause the container {container[:12]}"):
            self._api().pause(container)

    def unpause(self, container: str) -> None:
        with self._told(f"unpause the container {container[:12]}"):
            self._api().unpause(container)

    def exit_code(self, container: str) -> int:
        """The exit status of a container whose first process has ended."""
        with self._told(f"tell the exit status of the container {container[:12]}"):
            return int(self._api().wait(container, timeout=EXIT_TIMEOUT_S)["StatusCode"])

    def last_words(self, container: str) -> str:
        """The end of what a container wrote before it had the log of its worker."""
        with self._told(f"read the log of the container {container[:12]}"):
            return " ".join(self._api().logs(container, tail=5).decode(errors="replace").split())[-300:]

    def remove(self, container: str) -> None:
        """Ends and removes a container, also one that is gone already, or is being removed by another."""
        with self._told(f"remove the container {container[:12]}"), contextlib.suppress(NotFound):
            try:
                self._api().remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != CONFLICT:
                    raise

    def remove_all(self, node: str, launcher: str = "") -> int:
        """Removes all containers of a node, or of one launcher of it, whatever their state; returns how many there
        were."""
        labels = [f"{NODE_LABEL}={node}", *([f"{LAUNCHER_LABEL}={launcher}"] if launcher else [])]
        with self._told("list its containers"):
            listed = self._api().containers(all=True, quiet=True, filters={"label": labels})
            found = [str(one["Id"]) for one in listed]
        with ThreadPoolExecutor(REMOVALS_AT_ONCE) as pool:
            list(pool.map(self.remove, found))
        return len(found)

    def _api(self) -> Any:
        if getattr(self._local, "api", None) is None:
            self._local.api = docker.APIClient(base_url=self._address, version="auto", timeout=API_TIMEOUT_S)
        return self._local.api

    @contextlib.contextmanager
    def _told(self, action: str) -> Iterator[None]:
        try:
            yield
        except (DockerException, RequestException) as error:
            said = getattr(error, "explanation", None) or error
            raise EngineError(f"the container engine at {self._address} could not {action}: {said}") from error


def host_settings(plan: ContainerPlan, *, podman: bool = False) -> dict[str, Any]:
    """The engine's settings for a container: no capabilities, no network, nothing writable but its own memory.

    Podman takes no limit of inodes here. /tmp has one from the moment at which the container gets its function; names
    in volumes of an image are memory of the worker, whose limit ends them.
    """
    own = f"rw,nosuid,nodev,mode=1777,size={WRITABLE_BYTES}" + ("" if podman else f",nr_inodes={WRITABLE_INODES}")
    return {
        "network_mode": "host" if plan.network else "none",
        "binds": [f"{mount.source}:{mount.path}:ro" for mount in plan.shown if mount.source],
        "tmpfs": {
            **dict.fromkeys(plan.volumes, own),
            "/tmp": own,
            **{mount.path: "ro,size=64k" for mount in plan.shown if not mount.source},
        },
        "shm_size": WRITABLE_BYTES,
        "ipc_mode": "private",
        "read_only": True,
        # Else an engine with "init": true runs its own program first, out of /sbin, which the node's folders cover.
        "init": False,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "pids_limit": PIDS_MAX,
        # Podman's own number of processes is the largest there is, which it may not set where it is confined itself.
        "ulimits": _limits((("nofile", OPEN_FILES_MAX), ("nproc", PIDS_MAX), ("core", 0))),
        "device_requests": gpu_requests(plan.gpus),
        "log_config": LogConfig(type="json-file", config={"max-size": "64k", "max-file": "1"}),
    }


def gpu_requests(uuids: Iterable[str]) -> list[DeviceRequest]:
    """The engine's request for GPUs, by their names of the Container Device Interface (CDI): its specification on the
    node says which files and libraries of the driver belong to each."""
    names = [f"{GPU_KIND}={uuid}" for uuid in uuids]
    return [DeviceRequest(driver="cdi", device_ids=names)] if names else []


def _limits(pairs: Iterable[tuple[str, int]]) -> list[Ulimit]:
    return [Ulimit(name=name, soft=most, hard=most) for name, most in pairs]
