"""The function spec: all settings of one deployed version, immutable."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from ..errors import InvalidSpec
from ..function_calls import check_calls
from ..ids import BundleId, CheckpointId, FunctionName, LayerId
from ..node.devices import REQUEST_MAX, DeviceRequest
from ..sizes import GIB, MIB
from .adapters import check_adapters
from .interface import Interface
from .names import DEFAULT_PROJECT, is_function_name, is_project_name, project_of
from .setting_checks import check_image_name, check_network, check_origins, check_regions, check_secrets, check_tags
from .volume import check_volumes

RETRIES_MAX = 10
"""A call that ended so many workers ends the next one, too."""
MEMORY_MIN_BYTES = 16 * MIB
"""Least memory of a worker: a Python process that has imported nothing."""
SPEC_MAX_BYTES = 64 * 1024
"""A spec crosses a SEQPACKET socket in one message and lies in Redis; the limit keeps both comfortable."""


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling limits: how many workers a function may have, how long an idle one is kept, and then stands by."""

    min: int = 0
    max: int = 4
    keep_alive_s: float = 60.0
    standby_s: float = 0.0
    """Time after the keep-alive in which a worker of a language model stands by, without weights; 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max <= 1000 or self.max < 1:
            raise InvalidSpec(f"scale: 0 <= min <= max <= 1000 and max >= 1, got {self.min} and {self.max}")
        if not 0 <= self.keep_alive_s <= 86_400:
            raise InvalidSpec(f"scale: keep_alive_s must be 0 to 86400 seconds, got {self.keep_alive_s}")
        if not 0 <= self.standby_s <= 86_400:
            raise InvalidSpec(f"scale: standby_s must be 0 to 86400 seconds, got {self.standby_s}")


class SLO(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service level objectives, cold starts included: time to the first token (or byte), and per token after it."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.ttft_s is None and self.tpot_s is None:
            raise InvalidSpec("slo: ttft_s or tpot_s must be given", hint="write slo=SLO(ttft_s=2, tpot_s=0.2)")
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None and not 0 < value <= 86_400:
                raise InvalidSpec(f"slo: {name} must be above 0 and at most 86400 seconds, got {value}")


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rate and concurrency limits over all gateways; calls beyond them get 429. 0 is no limit."""

    rate: float = 0.0
    """Calls a second."""
    burst: int = 0
    """Calls that may come at once after a pause; 0: one second's worth of the rate."""
    concurrent: int = 0
    """Calls in progress, including those in the queue."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1_000_000:
            raise InvalidSpec(f"limits: rate must be 0 (no limit) to 1000000 calls a second, got {self.rate}")
        if not 0 <= self.burst <= 1_000_000 or (self.burst and not self.rate):
            raise InvalidSpec(f"limits: burst must be 0 to 1000000 calls beside a rate, got {self.burst}")
        if not 0 <= self.concurrent <= 1_000_000:
            raise InvalidSpec(f"limits: concurrent must be 0 (no limit) to 1000000 calls, got {self.concurrent}")


DEFAULT_KV_BYTES = 256 * MIB
EngineName = Literal["native", "transformers", "vllm"]


class LLMSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the language model engine. `dtype` is that of the arithmetic, "auto" that of the weights; they stay
    as they are stored."""

    engine: EngineName = "native"
    """The engine that computes, as it was chosen at the deploy."""
    first: Literal["", "native"] = ""
    """The engine that answers until `engine` has come up behind it, in the same worker; empty: none."""
    dtype: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    max_batch: int = 8
    max_context_tokens: int = 2048
    kv_memory_bytes: int = DEFAULT_KV_BYTES
    """Memory for keys and values; 0: on a GPU what the weights leave of the worker's share, elsewhere the default."""
    threads: int = 0
    """Number of threads; 0: one for each core that the worker may use."""
    tensor_parallel_size: int = 1
    """Devices that every layer is split over, with a process each."""

    def __post_init__(self) -> None:
        if self.first and self.engine == self.first:
            raise InvalidSpec(
                f"llm: first={self.first!r} answers until another engine is up, and the engine is {self.engine!r}",
                hint='leave out first, or name the other engine: engine="vllm", first="native"',
            )
        if not 1 <= self.tensor_parallel_size <= REQUEST_MAX:
            raise InvalidSpec(
                f"llm: tensor_parallel_size must be 1 to {REQUEST_MAX} devices, got {self.tensor_parallel_size}"
            )
        if self.tensor_parallel_size > 1 and (self.engine != "native" or self.first):
            raise InvalidSpec(
                f"llm: tensor_parallel_size is of the native engine alone, and the engine is {self.engine!r}",
                hint='leave it out, or write engine="native"',
            )
        if not 1 <= self.max_batch <= 256:
            raise InvalidSpec(f"llm: max_batch must be 1 to 256, got {self.max_batch}")
        if self.max_context_tokens < 16:
            raise InvalidSpec(f"llm: max_context_tokens must be at least 16, got {self.max_context_tokens}")
        if self.kv_memory_bytes and self.kv_memory_bytes < MIB:
            raise InvalidSpec(f"llm: kv_memory must be at least 1 MiB, got {self.kv_memory_bytes} bytes")

    @property
    def least_kv_bytes(self) -> int:
        """Memory for keys and values, as far as it is known before a worker has its device."""
        return self.kv_memory_bytes or DEFAULT_KV_BYTES


Keep = Literal["", "host"]
Isolation = Literal["namespaces", "gvisor", "container"]


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the platform must know to run one version. Equal specs are one version."""

    name: FunctionName
    """Its full name (`names`). A deploy may leave the project in it to `project`, or to the caller's key."""
    bundle: BundleId
    entry: str
    """`module:attribute` inside the bundle, for example `handler:Embed`."""
    profile: Literal["python", "torch"] = "python"
    """The pool that its workers come from, by the libraries that pooled processes have imported."""
    preload: Literal["", "transformers", "vllm"] = ""
    """A library that takes seconds to import: a node that has started the function once forks its further workers from
    a process that has imported it."""
    isolation: Isolation = "namespaces"
    """Isolation of a worker: namespaces on the node's kernel, gVisor, a kernel of its own in user space, or a container
    of an engine that the node has."""
    image: str = ""
    """Image that its containers are made of, by its name on the nodes' engines; empty: the generic one."""
    layer: LayerId | None = None
    """Installed packages that its workers import from; None: only those of the node."""
    weights: CheckpointId | None = None
    adapter: CheckpointId | None = None
    """A LoRA adapter that is applied to the weights when they are loaded."""
    adapters: dict[str, CheckpointId] = {}
    """LoRA adapters of a language model by the name with which a request chooses one, as its `model`."""
    llm: LLMSettings | None = None
    layered: bool = False
    """True if the entry is a `Layered` class: a user's own model that runs layer by layer."""
    memory_bytes: int = 512 * MIB
    """Limit on the worker's own memory; weights in the segment are shared and not counted."""
    gpu: DeviceRequest | None = None
    """Devices that each worker needs; None: the host alone."""
    concurrency: int = 1
    """Calls that one worker serves concurrently."""
    timeout_s: float = 300.0
    """Time limit of a call, including its time in the queue."""
    retries: int = 0
    """How often a call is sent to another worker after one that may have begun it was lost. 0: such a call fails,
    because its handler may have had effects already."""
    queue_timeout_s: float | None = None
    """Longest time in the queue; 0: none. None: limited by `timeout_s` alone."""
    limits: Limits = Limits()
    max_body_bytes: int = 0
    """Largest request body; 0: the gateway's own limit."""
    cors: list[str] = []
    """Origins whose pages may call it from a browser, or "*" for all; empty: none."""
    start_timeout_s: float = 120.0
    """Time limit of a worker's start, from order to ready; apart from the call's."""
    scale: Scale = Scale()
    slo: SLO | None = None
    """Objectives of the function; None: as fast as is worth the machines."""
    network: bool | list[str] = False
    """True if the worker sees the node's network; if not, it has only a loopback of its own. A list: that loopback, and
    the hosts that the list names (`egress_policy`) through a proxy of the node."""
    region: list[str] = []
    """Regions of the nodes that its workers may run on; empty: any."""
    env: dict[str, str] = {}
    tags: dict[str, str] = {}
    """Tags for cost allocation: each row of the ledger carries them, so usage can be summed by them."""
    project: str = ""
    """The function's project; empty: `default`, or in a deploy that of the caller's key."""
    secrets: list[str] = []
    """Names of the project's secrets that workers get as environment variables."""
    calls: list[str] = []
    """Names of the functions that its handler may call through the platform; empty: none."""
    volumes: list[str] = []
    """The project's volumes that workers see: "index", "index@2" for one version, "index:rw" to commit new ones."""
    probe: str = ""
    """Path that must answer with 2xx before a new version gets calls, for example "/healthz"; empty: the worker must be
    ready, and an LLM must list its model."""
    interface: Interface | None = None
    """The function's input and output types; None if its deploy did not send them."""

    schedule: str = ""
    """Cron expression (five fields) by which the live version is called; empty: never."""
    timezone: str = ""
    """Time zone of the schedule, such as "Europe/Berlin"; empty: UTC."""
    keep_requests: bool = False
    """True if requests and answers of synchronous calls are stored for a day, so that they can be replayed."""
    keep: Keep = ""
    """"host": one copy of its weights is kept in the host memory of some node, also while no worker uses them."""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_bounds()
        self._check_weights()
        check_origins(self.cors)
        check_tags(self.tags)
        check_secrets(self.secrets, self.env)
        check_network(self.network)
        if self.calls:
            self._check_calls()
        check_volumes(self.volumes, has_code=self.llm is None)
        if self.llm is not None and self.llm.tensor_parallel_size > 1:
            self._check_split(self.llm.tensor_parallel_size)
        if self.isolation == "gvisor" and self.gpu is not None:
            raise InvalidSpec(
                f"function {self.name}: devices need namespaces or a container, and isolation is gvisor",
                hint="leave out gpu, or isolation",
            )
        if self.image:
            self._check_image()
        if self.isolation == "gvisor" and self.egress:
            raise InvalidSpec(
                f"function {self.name}: a list of what it may reach needs namespaces or a container, and isolation is "
                "gvisor",
                hint="leave out the list (no network at all), or isolation",
            )

    def _check_image(self) -> None:
        if self.isolation != "container":
            raise InvalidSpec(
                f"function {self.name}: an image needs a container, and isolation is {self.isolation}",
                hint='set isolation="container" beside image, or leave out image',
            )
        check_image_name(self.name, self.image)

    def _check_names(self) -> None:
        if not is_function_name(self.name):
            raise InvalidSpec(
                f"function name {self.name[:200]!r} is not allowed",
                hint="use 1 to 63 of a-z, 0-9 and -, not - at either end; with its project: PROJECT.NAME",
            )
        module, _, attribute = self.entry.partition(":")
        if not all(part.isidentifier() for part in module.split(".")) or not attribute.isidentifier():
            raise InvalidSpec(f"entry {self.entry!r} must be module:attribute")
        if self.project and not is_project_name(self.project):
            raise InvalidSpec(f"project {self.project[:80]!r} is no name that a project could have")
        if self.project and "." in self.name and project_of(self.name) != self.project:
            raise InvalidSpec(
                f"function {self.name} is in project {project_of(self.name)}, and its setting names {self.project}",
                hint="name the project once: in the name, or as project",
            )
        check_regions(self.region)

    def _check_bounds(self) -> None:
        if not MEMORY_MIN_BYTES <= self.memory_bytes <= 1024 * GIB:
            raise InvalidSpec(f"memory must be 16 MiB to 1 TiB, got {self.memory_bytes} bytes")
        if not 1 <= self.concurrency <= 1000:
            raise InvalidSpec(f"concurrency must be 1 to 1000, got {self.concurrency}")
        if not 0 < self.timeout_s <= 86_400 or not 0 < self.start_timeout_s <= 86_400:
            raise InvalidSpec("timeout_s and start_timeout_s must be above 0 and at most 86400 seconds")
        if self.probe and (not self.probe.startswith("/") or not self.probe.isascii() or not self.probe.isprintable()):
            raise InvalidSpec(f"probe {self.probe[:80]!r} must be a path", hint='write a path such as "/healthz"')
        if self.schedule and len(self.schedule.split()) != 5:
            raise InvalidSpec(
                f"schedule {self.schedule[:80]!r} must be five fields: minute hour day month weekday",
                hint='"*/5 * * * *" is every five minutes',
            )
        if not 0 <= self.retries <= RETRIES_MAX:
            raise InvalidSpec(f"retries must be 0 to {RETRIES_MAX}, got {self.retries}")
        if self.queue_timeout_s is not None and not 0 <= self.queue_timeout_s <= 86_400:
            raise InvalidSpec(f"queue_timeout_s must be 0 to 86400 seconds, got {self.queue_timeout_s}")
        if not 0 <= self.max_body_bytes <= 1024 * GIB:
            raise InvalidSpec(f"max_body must be 0 (as large as the gateway takes) to 1 TiB, got {self.max_body_bytes}")

    def _check_weights(self) -> None:
        if self.scale.standby_s and self.llm is None:
            raise InvalidSpec(
                f"function {self.name}: scale: standby_s is for LLM, whose engine can give its weights back",
                hint="keep_alive_s keeps a worker of any function",
            )
        if self.llm is not None and self.weights is None:
            raise InvalidSpec(f"function {self.name}: LLM needs weights")
        if self.layered and (self.weights is None or self.llm is not None):
            raise InvalidSpec(f"function {self.name}: a Layered model needs weights, and is no LLM")
        if self.slo is not None and self.slo.tpot_s is not None and self.llm is None:
            raise InvalidSpec(
                f"function {self.name}: slo: tpot_s is the time between an LLM's tokens, and this is no LLM",
                hint="promise ttft_s alone: the time to the first byte",
            )
        if self.keep and self.weights is None:
            raise InvalidSpec(
                f"function {self.name}: keep is about weights, and it has none", hint="leave out keep, or name weights"
            )
        if self.adapter is not None and self.weights is None:
            raise InvalidSpec(
                f"function {self.name}: an adapter needs the weights that it adapts",
                hint='write weights="./base" beside adapter="./lora"',
            )
        if self.adapter is not None and self.adapter == self.weights:
            raise InvalidSpec(f"function {self.name}: weights and adapter are one and the same checkpoint")
        if self.adapters:
            check_adapters(self.name, self.adapters, self.llm, self.weights, self.adapter)

    def _check_split(self, ranks: int) -> None:
        devices = self.gpu
        if devices is None or devices.count != ranks:
            asked = "asks for none" if devices is None else f"asks for {str(devices)!r}"
            raise InvalidSpec(
                f"function {self.name}: tensor_parallel_size={ranks} needs {ranks} whole devices, and gpu {asked}",
                hint=f'leave out gpu, or write gpu={ranks}, or with a type gpu="H100:{ranks}"',
            )
        if self.isolation != "namespaces":
            raise InvalidSpec(
                f"function {self.name}: a model that is split over devices needs namespaces, and isolation is "
                f"{self.isolation}",
                hint="leave out isolation",
            )
        if self.scale.standby_s:
            raise InvalidSpec(
                f"function {self.name}: a model that is split over devices does not stand by",
                hint="leave out standby_s: keep_alive_s keeps the worker",
            )
        if self.network is True:
            raise InvalidSpec(
                f"function {self.name}: the processes of a model that is split over devices connect on a loopback of "
                "their own, and network=True would give them the node's",
                hint="leave out network: a language model needs none",
            )

    def _check_calls(self) -> None:
        check_calls(self.name, self.calls)
        for callee in self.calls:
            if not is_function_name(callee):
                raise InvalidSpec(f"calls: {callee[:80]!r} is no name that a function could have")
        if self.llm is not None or self.layered:
            kind = "an LLM" if self.llm is not None else "a Layered model"
            raise InvalidSpec(
                f"function {self.name}: {kind} calls no other functions",
                hint="leave out calls, or call both from a function of its own",
            )

    @property
    def home(self) -> str:
        """The function's project, `default` if it names none."""
        return self.project or DEFAULT_PROJECT

    @property
    def egress(self) -> list[str]:
        """The allowed hosts, if `network` is a list; empty: no network at all, or the node's."""
        return self.network if isinstance(self.network, list) else []

    @property
    def in_layers(self) -> bool:
        """True if its model can be cut into stages: by the native engine on one device, without named adapters, and in
        namespaces, where stages get their links."""
        native = self.llm is not None and self.llm.engine == "native" and self.llm.tensor_parallel_size == 1
        return (native or self.layered) and self.isolation == "namespaces" and not self.adapters

    @property
    def checkpoints(self) -> list[CheckpointId]:
        """Checkpoints that a worker attaches: the weights, then their adapter or the named ones in order of names."""
        named = [checkpoint for _, checkpoint in sorted(self.adapters.items())]
        return [one for one in (self.weights, self.adapter, *named) if one is not None]

    @property
    def pool(self) -> str:
        """The node's pool of its workers."""
        return pool_name(self.profile, self.isolation)

    @property
    def preloaded_pool(self) -> str:
        """The pool with its `preload`: "torch:transformers". The pool itself without one, and outside namespaces."""
        return f"{self.pool}:{self.preload}" if self.preload and self.isolation == "namespaces" else self.pool


def pool_name(profile: str, isolation: Isolation) -> str:
    """The name of a pool: "torch", "torch+gvisor"."""
    return profile if isolation == "namespaces" else f"{profile}+{isolation}"


def spec_bytes(spec: FunctionSpec) -> bytes:
    """The spec's one canonical form; its digest tells whether a deploy changes anything."""
    data = msgspec.json.encode(spec, order="deterministic")
    if len(data) > SPEC_MAX_BYTES:
        raise InvalidSpec(f"function {spec.name}: the spec has {len(data)} bytes, {SPEC_MAX_BYTES} at most")
    return data


def spec_digest(spec: FunctionSpec) -> str:
    return hashlib.sha256(spec_bytes(spec)).hexdigest()
