"""`fs deploy`: declarations by syntax tree, bundle, checkpoint, spec; what the store has is not sent again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fleetstart.controller.cli import output
from fleetstart.controller.cli.bundle import Bundle, make_bundle
from fleetstart.controller.cli.checkpoint import Published, publish_source
from fleetstart.controller.cli.checkpoint_source import Source, read_source
from fleetstart.controller.cli.client import Server, find_server
from fleetstart.controller.cli.declarations import Declaration, read_declarations
from fleetstart.controller.cli.layered import in_layers
from fleetstart.controller.cli.layout import Layout
from fleetstart.controller.cli.progress import Bar
from fleetstart.controller.cli.root import verb
from fleetstart.controller.cli.specs import adapter_of, build_spec, include_of, layers_of, module_name, weights_of
from fleetstart.controller.resources import Deployed
from fleetstart.runtime.contract.errors import InvalidSpec, NoHandler

S3 = "s3://"


@click.command
@click.argument("handler", metavar="HANDLER.PY[:NAME]")
@click.option("--name", help="Name of the function; default: the handler's own, in kebab-case.")
@click.option("--memory", metavar="SIZE", help="Limit on a worker's own memory, such as 512MiB.")
@click.option("--concurrency", type=int, help="Calls that one worker serves at a time.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Longest that one call may take.")
@click.option("--max", "max_workers", type=int, help="Most workers at a time.")
@click.option("--keep-alive", "keep_alive_s", type=float, metavar="SECONDS", help="How long an idle worker stays.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="For the bill; may be repeated.")
@click.option("--env", "env", multiple=True, metavar="KEY=VALUE", help="Environment of the worker; may be repeated.")
@verb()
@click.pass_obj
def command(home: Path, /, *, handler: str, url: str | None, as_json: bool, **flags: Any) -> None:
    """Deploy the functions in a handler file, or the one that is NAMEd.

    The file is read, not run. Flags win over what it declares. Prints one URL a function.
    """
    path, declarations = _selected(handler, flags["name"])
    overrides = _overrides(**flags)
    bundle = _bundle(path, declarations)
    with Server(find_server(url, home)) as server:
        if server.object_size(bundle.key) != len(bundle.data):
            server.put_object(bundle.key, bundle.data, len(bundle.data))
        deployed = [
            _deploy(server, declaration, path, bundle, overrides, Layout(home).cache) for declaration in declarations
        ]
    if as_json:
        output.json_data(deployed)
    else:
        for one in deployed:
            output.data(one.url)


def _selected(handler: str, name: str | None) -> tuple[Path, list[Declaration]]:
    """The file, and those of its functions that are to be deployed."""
    file, _, wanted = handler.rpartition(":") if ":" in handler and not Path(handler).exists() else (handler, "", "")
    path = Path(file)
    declarations = read_declarations(path)
    module_name(path)
    if wanted:
        chosen = [declaration for declaration in declarations if declaration.attribute == wanted]
        if not chosen:
            names = ", ".join(declaration.attribute for declaration in declarations)
            raise NoHandler(f"{path} declares no function {wanted!r}", hint=f"it declares {names}")
        declarations = chosen
    if name and len(declarations) > 1:
        names = ", ".join(f"{file}:{declaration.attribute}" for declaration in declarations)
        raise click.UsageError(f"--name fits one function, {path} declares {len(declarations)}: choose one of {names}")
    return path, declarations


def _overrides(
    *,
    name: str | None,
    memory: str | None,
    concurrency: int | None,
    timeout_s: float | None,
    max_workers: int | None,
    keep_alive_s: float | None,
    env: Sequence[str],
    tags: Sequence[str],
) -> dict[str, Any]:
    scale = {"max": max_workers, "keep_alive_s": keep_alive_s}
    given: dict[str, Any] = {
        "name": name,
        "memory": memory,
        "concurrency": concurrency,
        "timeout_s": timeout_s,
        "scale": {key: value for key, value in scale.items() if value is not None} or None,
        "env": _pairs("--env", env) or None,
        "tags": _pairs("--tag", tags) or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given]
    for pair in pairs:
        if not pair[0] or not pair[1]:
            raise click.UsageError(f"{option} {pair[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _bundle(path: Path, declarations: Sequence[Declaration]) -> Bundle:
    folder = path.parent
    include = sorted({pattern for declaration in declarations for pattern in include_of(declaration)})
    texts = [text for declaration in declarations for text in (weights_of(declaration), adapter_of(declaration))]
    weights = [folder / text for text in texts if text and not text.startswith(S3)]
    return make_bundle(folder, include=include, skip=[item for item in weights if item.resolve() != folder.resolve()])


def _deploy(
    server: Server, declaration: Declaration, path: Path, bundle: Bundle, overrides: dict[str, Any], cache: Path
) -> Deployed:
    started_s = time.monotonic()
    text = weights_of(declaration)
    if declaration.kind != "function" and not text:
        how = f"{declaration.attribute} = LLM" if declaration.kind == "llm" else "@function"
        what = "LLM" if declaration.kind == "llm" else f"{declaration.attribute} is Layered and"
        raise InvalidSpec(f"{path}:{declaration.line}: {what} needs weights", hint=f'write {how}(weights="...")')
    published: Published | None = None
    adapter: Published | None = None
    if text:
        with Bar(declaration.attribute, live=output.is_terminal()) as bar:
            source = _source(path.parent, text)
            if declaration.kind == "layered":
                source = in_layers(source, layers_of(declaration), f"{path}:{declaration.line}")
            published = publish_source(source, server, cache=cache, progress=bar)
            if change := adapter_of(declaration):
                adapter = publish_source(_source(path.parent, change), server, cache=cache, progress=bar)
    spec = build_spec(
        declaration,
        module=module_name(path),
        bundle=bundle.id,
        weights=published.id if published else None,
        adapter=adapter.id if adapter else None,
        imports=bundle.imports,
        overrides=overrides,
    )
    deployed = server.post("/api/v1/functions", spec, Deployed)
    output.say(_told(deployed, [one for one in (published, adapter) if one], time.monotonic() - started_s))
    return deployed


def _source(folder: Path, text: str) -> Source:
    if text.startswith(S3):
        from fleetstart.controller.cli.s3_origins import read_s3  # late: boto3 takes a third of a second

        return read_s3(text)
    return read_source(folder / text)


def _told(deployed: Deployed, published: Sequence[Published], took_s: float) -> str:
    text = (
        f"{deployed.name}@{deployed.version} {'deployed' if deployed.created else 'is live already'} in {took_s:.1f} s"
    )
    for what, one in zip(("weights", "adapter"), published, strict=False):
        sent = f"{output.size(one.uploaded_bytes)} sent" if one.uploaded_bytes else "in the store already"
        text += f"; {what} {output.size(one.weight_bytes)}, {sent}"
    return text
