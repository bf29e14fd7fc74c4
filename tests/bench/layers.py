"""Claim: packages of 500 MB are built and sent once, and a node that has them starts a function as if it had none.

Each round has a system of its own and packages of new bytes: one wheel with a large library file and two thousand
modules. Measured are the first deploy (resolve, install, compile, checksums, upload), the deploy of a second function
with the same packages, the first call on a node without the layer, a cold start on the node that now has it, and one
of a function without packages. The baseline of the build is uv alone, installing the same wheel with its bytecode.

The starts are measured with each isolation of `--isolation` (namespaces, containers of an engine of the benchmark's
own): on a node that has never seen the layer, against the time of its fetch, and on one that has it, in turn with
starts of a function without packages.

Then the same with a package that people have, scikit-learn, with the first of these isolations: the first start of a
version imports it, from the second on a waiting worker has imported it. That part needs a package index, and is left
out by --quick and by --wakes.

Run: python -m tests.bench.layers [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from fleetstart.controller.cli.packages.uv import find_uv
from fleetstart.runtime.contract.function.spec import Isolation, pool_name
from tests.bench.harness.samples import Report, fine, median, parse_options, progress, spread
from tests.bench.harness.system import System, running
from tests.containers.engine import docker_engine
from tests.wheels import make_wheel

SIZE_BYTES, QUICK_BYTES = 500_000_000, 20_000_000
MODULES, QUICK_MODULES = 2000, 100
"""As many as torch has, whose installation is the usual large one."""
IMPORTED = 50
"""Of them, those that the function imports at its start."""
KEEP_ALIVE_S = "0.2"
PAIRS, QUICK_PAIRS = 10, 2
"""Starts of a node that has the layer, with and without it in turn."""
SPARE_S = 10.0
"""Limit for another spare, of the kind that was taken, which may be prepared for its version."""
WAKES = {
    "unseen": "woken on a node that never had the layer, s",
    "fetch": "of it the layer's fetch, s",
    "with_layer": "woken on a node that has it, ms",
    "plain": "woken without packages, in turn, ms",
}
STEPS = {
    "uv": "uv alone: install and compile",
    "first_deploy": "first deploy",
    "second_deploy": "second function, same packages",
    "without_layer": "cold start, node without the layer",
    "with_layer": "cold start, node with it",
    "plain": "cold start, no packages",
}
REAL = "scikit-learn==1.9.1"
REAL_STEPS = {
    "deploy": "first deploy, with the download",
    "without_layer": "cold start, node without the layer",
    "first": "cold start, node with it: the version's first",
    "second": "cold start, node with it: its second",
    "plain": "cold start, no packages",
}
REAL_HANDLER = """
from sklearn.linear_model import LogisticRegression
from fleetstart.runtime import function

@function(memory="512MiB", requirements=["REAL"], isolation="ISOLATION")
def NAME() -> str:
    return LogisticRegression.__name__
"""
HANDLER = """
import heavy
from fleetstart.runtime import function

@function(memory="256MiB", isolation="ISOLATION")
def NAME() -> int:
    return heavy.COUNT
"""
PLAIN = HANDLER.replace("import heavy\n", "").replace("heavy.COUNT", "1")


def make_packages(folder: Path, size_bytes: int, modules: int) -> None:
    """One wheel. Its library file is random: nothing compresses it."""
    files: dict[str, bytes | str] = {
        f"heavy/m{number}.py": f"def f{number}(x):\n    return x + {number}\n" * 20 for number in range(modules)
    }
    lines = "".join(f"from heavy import m{number}\n" for number in range(IMPORTED))
    files["heavy/__init__.py"] = f"{lines}COUNT = {IMPORTED}\n"
    files["heavy/libheavy.so.1"] = os.urandom(size_bytes)
    make_wheel(folder, "heavy", "1.0", files)


def write_handler(folder: Path, name: str, wheels: Path | None, isolation: Isolation = "namespaces") -> str:
    folder.mkdir(parents=True)
    text = (HANDLER if wheels else PLAIN).replace("NAME", name).replace("ISOLATION", isolation)
    (folder / "handler.py").write_text(text)
    if wheels is not None:
        (folder / "requirements.txt").write_text(f"--no-index\n-f {wheels}\nheavy\n")
    return str(folder / "handler.py")


def install_alone(work: Path, wheels: Path) -> float:
    """Seconds that uv takes by itself, with an empty cache."""
    command = [find_uv(), "pip", "install", "-q", "--no-index", "-f", str(wheels), "--target", str(work / "alone")]
    command += ["--python", sys.executable, "--compile-bytecode", "--link-mode", "copy", "heavy"]
    began_s = time.monotonic()
    subprocess.run(command, env={**os.environ, "UV_CACHE_DIR": str(work / "alone-cache")}, check=True)
    return time.monotonic() - began_s


def deploy_s(system: System, handler: str) -> float:
    began_s = time.monotonic()
    system.deploy(handler, "--keep-alive", KEEP_ALIVE_S)
    return time.monotonic() - began_s


def call_s(system: System, name: str) -> float:
    with system.connect() as connection:
        answer = connection.post(f"/fn/{name}", {}).expect()
    if answer.headers["fs-start"] == "hot":
        raise RuntimeError("the worker was there already: nothing was started")
    system.wait_asleep(name)
    return answer.total_ms / 1e3


def measure(size_bytes: int, modules: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="fs-bench-layers-") as folder:
        work = Path(folder)
        make_packages(work / "wheels", size_bytes, modules)
        os.environ["UV_CACHE_DIR"] = str(work / "cache")
        handlers = {
            name: write_handler(work / name, name, None if name == "plain" else work / "wheels")
            for name in ("first", "second", "plain")
        }
        found = {"uv": install_alone(work, work / "wheels")}
        with running("python") as system:
            deploy_s(system, handlers["plain"])
            found["first_deploy"] = deploy_s(system, handlers["first"])
            found["second_deploy"] = deploy_s(system, handlers["second"])
            found["without_layer"] = call_s(system, "first")
            found["with_layer"] = call_s(system, "second")
            call_s(system, "plain")  # its bundle is fetched, as the layer is
            found["with_layer_again"] = call_s(system, "second")
            found["plain"] = call_s(system, "plain")
        return found


def measure_wakes(
    size_bytes: int, modules: int, isolations: list[Isolation], pairs: int
) -> dict[str, dict[str, list[float]]]:
    """By isolation and measure of WAKES. Each isolation has a node of its own, and all the same packages."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fs-bench-layers-") as folder, contextlib.ExitStack() as opened:
        work = Path(folder)
        make_packages(work / "wheels", size_bytes, modules)
        os.environ["UV_CACHE_DIR"] = str(work / "cache")
        engine = opened.enter_context(docker_engine()).address if "container" in isolations else ""
        for isolation in isolations:
            progress(f"starts with {isolation}")
            with running_with(isolation, engine) as system:
                found[isolation] = _wakes(system, work, isolation, pairs)
    return found


@contextlib.contextmanager
def running_with(isolation: Isolation, engine: str) -> Iterator[System]:
    """A system whose node takes functions with this isolation. `engine`: address of one for containers."""
    profiles = ",".join(dict.fromkeys(("python", pool_name("python", isolation))))
    with running(profiles, FS_CONTAINER_ENGINE=engine if isolation == "container" else "") as system:
        if isolation == "container":
            system.wait("a node with containers", lambda: system.api("/status")["nodes"][0]["isolations"])
        yield system


def _wakes(system: System, work: Path, isolation: Isolation, pairs: int) -> dict[str, list[float]]:
    handlers = {
        name: write_handler(work / isolation / name, name, None if name == "plain" else work / "wheels", isolation)
        for name in ("first", "plain")
    }
    for handler in handlers.values():
        deploy_s(system, handler)
    pool = pool_name("python", isolation)
    wake_s(system, "plain", pool)  # starts a pool, where it is kept once it was asked for
    unseen_s, phases = wake_s(system, "first", pool)
    found = {"unseen": [unseen_s], "fetch": [phases["fetch"]], "with_layer": [], "plain": []}
    system.wait("a worker that has imported the packages", lambda: system.prepared_made("first"))
    for _ in range(pairs):
        for measure, name in (("with_layer", "first"), ("plain", "plain")):
            found[measure].append(1e3 * wake_s(system, name, pool)[0])
    return found


def wake_s(system: System, name: str, pool: str) -> tuple[float, dict[str, float]]:
    """Seconds of a call that starts a worker, and of its phases. Returns once another spare is there, if one comes."""
    spares, prepared = system.spares_made(pool), system.prepared_made(name)
    with system.connect() as connection:
        answer = connection.post(f"/fn/{name}", {}).expect()
    if answer.headers["fs-start"] == "hot":
        raise RuntimeError("the worker was there already: nothing was started")
    traced = system.trace(answer.headers["x-request-id"])
    phases: defaultdict[str, float] = defaultdict(float)
    for phase in traced["timeline"]["phases"]:
        phases[phase["name"]] += (phase["ended_ns"] - phase["started_ns"]) / 1e9
    system.wait_asleep(name)
    if traced["pooled"]:
        system.wait(
            "another spare",
            lambda: system.prepared_made(name) > prepared if prepared else system.spares_made(pool) > spares,
            SPARE_S,
        )
    return answer.total_ms / 1e3, phases


def measure_real(work: Path, isolation: Isolation, engine: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each step, and of the import in it."""
    os.environ["UV_CACHE_DIR"] = str(work / "cache")
    handlers = {"plain": write_handler(work / "plain", "plain", None, isolation)}
    for name in ("fit", "predict"):
        (work / name).mkdir()
        text = REAL_HANDLER.replace("NAME", name, 1).replace("REAL", REAL).replace("ISOLATION", isolation)
        (work / name / "handler.py").write_text(text)
        handlers[name] = str(work / name / "handler.py")
    with running_with(isolation, engine) as system:
        deploy_s(system, handlers["plain"])
        found = {"deploy": deploy_s(system, handlers["fit"])}
        deploy_s(system, handlers["predict"])
        found["without_layer"] = call_s(system, "fit")
        system.wait("a prepared spare", lambda: _preloaded_bytes(system))
        before = _preloaded_bytes(system)
        call_s(system, "plain")
        found["plain"] = call_s(system, "plain")
        imports: dict[str, float] = {}
        for step in ("first", "second"):
            found[step], imports[step] = call_with_import_s(system, "predict")
            if step == "first":
                system.wait("another one", lambda: _preloaded_bytes(system) > before)
    return found, imports


def call_with_import_s(system: System, name: str) -> tuple[float, float]:
    with system.connect() as connection:
        answer = connection.post(f"/fn/{name}", {}).expect()
    phases = system.trace(answer.headers["x-request-id"])["timeline"]["phases"]
    system.wait_asleep(name)
    import_ns = sum(phase["ended_ns"] - phase["started_ns"] for phase in phases if phase["name"] == "import")
    return answer.total_ms / 1e3, import_ns / 1e9


def _preloaded_bytes(system: System) -> int:
    return sum(node["preloaded_bytes"] for node in system.api("/status")["nodes"])


def tell_wakes(report: Report, found: dict[str, dict[str, list[float]]]) -> None:
    report.samples["wakes"] = found
    rows = [["median (quartiles)", *found]]
    rows += [[words, *(spread(one[measure]) for one in found.values())] for measure, words in WAKES.items()]
    unseen = [fine(median(one["unseen"]) / median(one["fetch"])) for one in found.values()]
    more_ms = [fine(median(one["with_layer"]) - median(one["plain"])) for one in found.values()]
    rows += [["unseen: times the fetch", *unseen], ["with the layer: more than without, ms", *more_ms]]
    report.tell("Starts with packages, by isolation", rows)


def _add_options(parser: argparse.ArgumentParser) -> None:
    known = [one for one in get_args(Isolation) if one != "gvisor"]
    parser.add_argument("--isolation", nargs="+", choices=known, default=["namespaces"], help="of the starts")
    parser.add_argument("--wakes", action="store_true", help="the starts with each isolation alone")


def main() -> None:
    options = parse_options(__doc__, rounds=5, quick_rounds=1, more=_add_options)
    report = Report("packages of 500 MB are built and sent once, and cost a start nothing once a node has them")
    size_bytes, modules = (QUICK_BYTES, QUICK_MODULES) if options.quick else (SIZE_BYTES, MODULES)
    report.setup = {"size_bytes": size_bytes, "modules": modules, "imported": IMPORTED}
    if not options.extra["wakes"]:
        _rounds(report, size_bytes, modules, options.rounds)
    pairs = QUICK_PAIRS if options.quick else PAIRS
    tell_wakes(report, measure_wakes(size_bytes, modules, options.extra["isolation"], pairs))
    if not options.quick and not options.extra["wakes"]:
        _real_rounds(report, options.rounds, options.extra["isolation"][0])
    report.save(options.json)


def _rounds(report: Report, size_bytes: int, modules: int, rounds: int) -> None:
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, value in measure(size_bytes, modules).items():
            samples[name].append(value)
    report.samples |= {"seconds": dict(samples)}
    base = median(samples["uv"])
    rows = [["packages of 500 MB", "seconds", "ratio to uv alone"]]
    for name, what in {**STEPS, "with_layer_again": "cold start, node with it, second time"}.items():
        rows.append([what, spread(samples[name]), fine(median(samples[name]) / base)])
    report.tell("Packages of a function", rows)


def _real_rounds(report: Report, rounds: int, isolation: Isolation) -> None:
    samples: defaultdict[str, list[float]] = defaultdict(list)
    imports: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fs-bench-layers-") as folder, contextlib.ExitStack() as opened:
        engine = opened.enter_context(docker_engine()).address if isolation == "container" else ""
        for number in range(rounds):
            progress(f"{REAL}: round {number + 1} of {rounds}")
            (work := Path(folder) / str(number)).mkdir()
            found, imported = measure_real(work, isolation, engine)
            for name, value in found.items():
                samples[name].append(value)
            for name, value in imported.items():
                imports[name].append(value)
    base = median(samples["first"])
    rows = [[f"{REAL} and what it needs, {isolation}", "seconds", "of it import", "ratio to the first start"]]
    for name, what in REAL_STEPS.items():
        of_it = spread(imports[name]) if name in imports else ""
        rows.append([what, spread(samples[name]), of_it, fine(median(samples[name]) / base)])
    report.tell("A package that people have", rows)
    report.samples |= {"real_seconds": dict(samples), "real_import_seconds": dict(imports)}


if __name__ == "__main__":
    main()
