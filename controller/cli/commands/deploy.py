"""`fs deploy`: reads declarations, packs the bundle, publishes packages and weights, sends the spec.

Nothing is sent twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.interface import Interface
from fleetstart.runtime.contract.ids import LIVE
from fleetstart.runtime.contract.store_url import is_s3
from fleetstart.runtime.contract.weights.engine_choice import EngineChoice

from ...schemas.functions import Deployed
from .. import output
from ..api_client import ApiClient, find_server
from ..completions import files
from ..curl_hint import curl_for_function
from ..handler.bundle import Bundle, make_bundle
from ..handler.packed_function import PackedFunction, summary_of
from ..handler.select import flags_of, select_handlers
from ..handler.setting_flags import setting_flags
from ..handler.source.declarations import Declaration
from ..handler.source.interface import batch_size, interface_of
from ..handler.source.layered import with_layer_names
from ..handler.spec import (
    adapter_of,
    adapters_of,
    build_spec,
    engine_of,
    first_of,
    include_of,
    layer_pattern_of,
    module_name,
    tensor_parallel_of,
    weights_of,
)
from ..home import HomeLayout
from ..packages.missing_imports import is_installed, missing_imports
from ..packages.publish import PublishedLayer, publish_layer
from ..packages.requirements import Requirements, find_requirements
from ..progress import ProgressBar
from ..rollout import wait_until_serving
from ..root import verb
from ..weights.engine_support import has_chat_template, require_runnable, require_task
from ..weights.publish import Published, publish_source
from ..weights.source import Source, read_source
from ..weights.upload import CheckpointTarget

if TYPE_CHECKING:
    from ..handler.dry_run import DryRun


class Percent(click.ParamType[int]):
    """ "10%" or "10"."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).removesuffix("%")
        if not (text.isascii() and text.isdecimal() and len(text) <= 3) or not 1 <= int(text) <= 100:
            self.fail(f"{value!r} is not 1% to 99% of the calls", param, ctx)
        return int(text)


@click.command
@click.argument("handler", metavar="HANDLER.PY[:NAME]", shell_complete=files)
@setting_flags
@click.option("--alias", default=LIVE, help="Point this alias at the new version; live does not move.")
@click.option(
    "--canary", type=Percent(), default=100, metavar="PERCENT", help="Send this share of the calls to it, as in 10%."
)
@click.option("--probe/--no-probe", default=True, help="Start a worker of it before calls go to it; the default.")
@click.option("--upgrade", is_flag=True, help="Look for newer versions of packages whose versions are left open.")
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would be sent, and the predicted cold start.")
@verb()
@click.pass_obj
def command(
    home: Path,
    /,
    *,
    handler: str,
    alias: str,
    canary: int,
    probe: bool,
    upgrade: bool,
    dry_run: bool,
    url: str | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Deploy the functions in a handler file, or the one with this NAME.

    The file is read, not run. Flags win over fs.toml beside it, and fs.toml over the decorator; `fs config show` prints
    the origin of each setting. Calls go to the new version once a worker of it has started and answered its probe
    (`probe="/healthz"`; a language model's name); if it fails, the old version keeps them. Prints one URL a function.
    """
    if canary < 100 and alias != LIVE:
        raise click.UsageError("--canary takes a share of live's calls, --alias takes none: give only one of them")
    path, handlers = select_handlers(handler, flags_of(**flags))
    declarations = [one.declaration for one in handlers]
    bundle = bundle_of(path, declarations)
    target: dict[str, str | int] = {"alias": alias, "percent": canary, "probe": int(probe)}
    address = find_server(url, home)
    with ApiClient(address) as server:
        if dry_run:
            cache = HomeLayout(home).cache
            return _rehearse([_foreseen(server, one, path, bundle, cache, upgrade) for one in declarations], as_json)
        cache = HomeLayout(home).cache
        read = read_functions(declarations, path)
        deployed = deploy_all(server, read, path, bundle, target, cache, upgrade=upgrade)
    if as_json:
        output.json_data(deployed)
    else:
        for one, function in zip(deployed, read, strict=True):
            output.data(one.url)
            output.message(curl_for_function(one.url, function.interface, address, chats=function.chats))
    return output.OK


def read_functions(declarations: Sequence[Declaration], path: Path) -> list[ReadFunction]:
    """Declarations with their weights: what is refused by itself uploads nothing. Errors: as of `_read`."""
    return [_read(declaration, path) for declaration in declarations]


def deploy_all(
    server: ApiClient,
    read: Sequence[ReadFunction],
    path: Path,
    bundle: Bundle,
    target: dict[str, str | int],
    cache: Path,
    *,
    upgrade: bool = False,
) -> list[Deployed]:
    """Deploys functions one after the other, waiting for each rollout. `target`: the query of the deploy; `upgrade`:
    resolve requirements anew."""
    if server.object_size(bundle.key) != len(bundle.data):
        server.put_object(bundle.key, bundle.data, len(bundle.data))
    return [_deploy(server, one, path, bundle, target, cache, upgrade) for one in read]


def bundle_of(path: Path, declarations: Sequence[Declaration]) -> Bundle:
    folder = path.parent
    include = sorted({pattern for declaration in declarations for pattern in include_of(declaration)})
    texts = [text for one in declarations for text in (weights_of(one), adapter_of(one), *adapters_of(one).values())]
    weights = [folder / text for text in texts if text and not is_s3(text)]
    return make_bundle(folder, include=include, skip=[item for item in weights if item.resolve() != folder.resolve()])


def _deploy(
    server: ApiClient,
    read: ReadFunction,
    path: Path,
    bundle: Bundle,
    target: dict[str, str | int],
    cache: Path,
    upgrade: bool,
) -> Deployed:
    started_s = time.monotonic()
    packed = _packed(server, read, path, bundle, cache, upgrade)
    deployed = server.post("/api/v1/functions", packed.spec, Deployed, **target)
    _warn_of_imports(read.declaration, path, bundle, packed)
    if deployed.trying:
        wait_until_serving(server, deployed)
    output.message(summary_of(deployed, packed, time.monotonic() - started_s))
    if deployed.warning:
        output.message(f"warning: {deployed.warning}")
    return deployed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFunction:
    """A declaration with its interface and its weights, of which only headers and small files have been read."""

    declaration: Declaration
    interface: Interface
    weights: Source | None
    adapter: Source | None
    adapters: Mapping[str, Source] = field(default_factory=dict)
    engine: EngineChoice | None = None
    """Of an `LLM`."""

    @property
    def chats(self) -> bool:
        """True for an `LLM` whose weights have a template of chats."""
        return self.engine is not None and self.weights is not None and has_chat_template(self.weights)


def _read(declaration: Declaration, path: Path) -> ReadFunction:
    """Reads interface and weights of a declaration. Errors: HandlerSyntax; InvalidSpec; those of `read_source`;
    CheckpointInvalid for what an `LLM` or a `Transformers` cannot run."""
    where = f"{path}:{declaration.line}"
    text = weights_of(declaration)
    if declaration.kind != "function" and not text:
        maker = {"llm": "LLM", "transformers": "Transformers"}.get(declaration.kind)
        how = f"{declaration.attribute} = {maker}" if maker else "@function"
        what = maker or f"{declaration.attribute} is Layered and"
        raise InvalidSpec(f"{where}: {what} needs weights", hint=f'write {how}(weights="...")')
    interface = interface_of(path, declaration)
    if not text:
        return ReadFunction(declaration=declaration, interface=interface, weights=None, adapter=None)
    source = _source(path.parent, text)
    if declaration.kind == "layered":
        source = with_layer_names(source, layer_pattern_of(declaration), where)
    engine = None
    if declaration.kind == "llm":
        engine = require_runnable(
            source, where, engine_of(declaration), first_of(declaration), tensor_parallel_of(declaration)
        )
    if declaration.kind == "transformers":
        require_task(source, declaration.settings["task"], where)
    change = adapter_of(declaration)
    return ReadFunction(
        declaration=declaration,
        interface=interface,
        weights=source,
        adapter=_source(path.parent, change) if change else None,
        adapters={name: _source(path.parent, text) for name, text in adapters_of(declaration).items()},
        engine=engine,
    )


def _packed(
    store: CheckpointTarget, read: ReadFunction, path: Path, bundle: Bundle, cache: Path, upgrade: bool
) -> PackedFunction:
    """Publishes packages and weights of a function, and builds its spec."""
    declaration = read.declaration
    layer = _layer(store, declaration, path, cache, upgrade)
    published: Published | None = None
    adapter: Published | None = None
    adapters: dict[str, Published] = {}
    if read.weights is not None:
        with ProgressBar(declaration.attribute, live=output.is_terminal()) as bar:
            published = publish_source(read.weights, store, cache=cache, progress=bar)
            if read.adapter is not None:
                adapter = publish_source(read.adapter, store, cache=cache, progress=bar)
            for name, source in read.adapters.items():
                adapters[name] = publish_source(source, store, cache=cache, progress=bar)
    spec = build_spec(
        declaration,
        module=module_name(path),
        bundle=bundle.id,
        weights=published.id if published else None,
        adapter=adapter.id if adapter else None,
        adapters={name: one.id for name, one in adapters.items()},
        layer=layer.layer.id if layer else None,
        modules=layer.layer.modules if layer else (),
        imports=bundle.imports,
        overrides={},
        interface=read.interface,
        batch=batch_size(path, declaration),
        engine=read.engine.engine if read.engine else None,
    )
    parts = {"weights": published, "adapter": adapter} | {f"adapter {name}": one for name, one in adapters.items()}
    checkpoints = {what: one for what, one in parts.items() if one is not None}
    return PackedFunction(spec=spec, checkpoints=checkpoints, layer=layer, engine=read.engine)


def _warn_of_imports(declaration: Declaration, path: Path, bundle: Bundle, packed: PackedFunction) -> None:
    """Names imports that workers will not find; a warning, because a node may have what this machine has not. What an
    image has is not known here."""
    if declaration.kind in ("llm", "transformers") or path.name not in bundle.sources or packed.spec.image:
        return
    modules = packed.layer.layer.modules if packed.layer is not None else ()
    for one in missing_imports(path.name, bundle.sources, modules, is_installed):
        output.message(
            f"warning: {path.parent / one.file}:{one.line}: {one.module} is neither in the bundle, nor among the "
            f'packages that {declaration.attribute} requires, nor installed here: add it to requirements=["..."]'
        )


def requirements_of(declaration: Declaration, folder: Path) -> Requirements | None:
    """The packages that a function requires. A model without code has those of its setting, and of no file."""
    if declaration.kind in ("llm", "transformers") and "requirements" not in declaration.settings:
        return None
    return find_requirements(declaration.settings.get("requirements"), declaration.attribute, folder)


def _layer(
    store: CheckpointTarget, declaration: Declaration, path: Path, cache: Path, upgrade: bool
) -> PublishedLayer | None:
    """Publishes the packages that a function requires; the log of their build goes to stderr."""
    needed = requirements_of(declaration, path.parent)
    if needed is None:
        return None
    names = declaration.settings.get("secrets")
    with ProgressBar(f"{declaration.attribute}: packages", live=output.is_terminal()) as bar:
        return publish_layer(
            needed,
            store,
            cache=cache.parent,
            environ=os.environ,
            log=output.message,
            progress=bar,
            secrets=[str(name) for name in names] if isinstance(names, list | tuple) else (),
            upgrade=upgrade,
        )


class _Unsent:
    """Store of a dry run: knows which objects exist, and writes none."""

    def __init__(self, server: ApiClient) -> None:
        self.object_size = server.object_size

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        return

    def begin_upload(self, manifest: bytes) -> None:
        return


def _foreseen(
    server: ApiClient, declaration: Declaration, path: Path, bundle: Bundle, cache: Path, upgrade: bool
) -> DryRun:
    from ...schemas.planning import Forecast, Proposal
    from ..handler.dry_run import DryRun  # late: the planner comes with it

    packed = _packed(_Unsent(server), _read(declaration, path), path, bundle, cache, upgrade)
    base = packed.checkpoints.get("weights")
    proposal = Proposal(
        spec=packed.spec,
        segment_bytes=sum(one.segment_bytes for one in packed.checkpoints.values()),
        layout=base.layout if base is not None and packed.spec.in_layers else None,
        packages_bytes=packed.layer.layer.size_bytes if packed.layer else 0,
    )
    forecast = server.post("/api/v1/forecast", proposal, Forecast)
    return DryRun(
        name=forecast.name,
        bundle_bytes=len(bundle.data),
        new_bundle_bytes=0 if server.object_size(bundle.key) == len(bundle.data) else len(bundle.data),
        weight_bytes=sum(one.weight_bytes for one in packed.checkpoints.values()),
        new_weight_bytes=sum(one.uploaded_bytes for one in packed.checkpoints.values()),
        layer_bytes=packed.layer.layer.size_bytes if packed.layer else 0,
        new_layer_bytes=packed.layer.uploaded_bytes if packed.layer else 0,
        memory_bytes=packed.spec.memory_bytes,
        forecast=forecast,
    )


def _rehearse(foreseen: Sequence[DryRun], as_json: bool) -> int:
    if as_json:
        output.json_data(foreseen)
    else:
        from ..handler.dry_run import render_dry_run

        for one in foreseen:
            output.data(render_dry_run(one))
    stuck = any(not one.forecast.explanation.plan.stages for one in foreseen)
    return output.FAILED if stuck else output.OK


def _source(folder: Path, text: str) -> Source:
    if is_s3(text):
        from ..weights.s3_files import read_s3  # late: boto3 takes a third of a second

        return read_s3(text)
    return read_source(folder / text)
