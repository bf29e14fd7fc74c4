"""`make demo`: a language model is deployed, woken from zero, answers, and is billed; then nothing is left.

Everything is done by the `fs` commands that are printed, in a fresh FS_HOME inside the checkout (or the one given
as argument). The demo fails if a command fails, or if a process, shared memory or a file outlives it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".fleetstart").absolute()
FS = str(Path(sys.executable).with_name("fs"))
SHARED = (Path("/dev/shm"), Path(tempfile.gettempdir()))
TORCH_S = 60.0
GONE_S = 10.0
"""How long a process may take to be gone after `fs down`."""


def main() -> int:
    before = ours_on_disk()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(HOME, ignore_errors=True)
    try:
        play()
    finally:
        left = clean(before)
    for what in left:
        print(f"left behind: {what}", file=sys.stderr)
    return 1 if left else 0


def play() -> None:
    url = fs("up", "--port", "0", captured=True).strip()
    os.environ["FS_URL"] = url
    title("Deploy: the handler is read, not run, nor tried; its weights become a checkpoint in the store")
    function_url = fs("deploy", "examples/chat/handler.py", "--no-probe", captured=True).strip()
    title("A fork server that has imported torch stands ready; a worker does not")
    await_torch()
    fs("status")
    title("The first call finds nothing running: it waits for a worker and for 269 MB of weights")
    ask("Why is the sky blue? Answer in one sentence.")
    title("Where the time of that call went")
    fs("trace", "chat")
    title("The second call finds a hot worker")
    ask("Name three colours of the rainbow.")
    title("The bill: calls are billed, starting and fetching is not")
    fs("usage")
    print(f"\nAny OpenAI client can use {function_url}/v1, with what is in {HOME / 'key'} as its api_key", flush=True)


def await_torch() -> None:
    """Until the node's fork server has imported torch: a node that just started pays for that once, not a call."""
    ends = time.monotonic() + TORCH_S
    while time.monotonic() < ends:
        status = subprocess.run([FS, "status", "--json"], env=environment(), capture_output=True, check=True)
        if any("torch" in node["profiles"] for node in json.loads(status.stdout)["nodes"]):
            return
        time.sleep(0.1)
    sys.exit(f"no fork server with torch after {TORCH_S:.0f} s; logs are in {HOME / 'logs'}")


def environment() -> dict[str, str]:
    return {**os.environ, "FS_HOME": str(HOME)}


def ask(question: str) -> None:
    body = {"model": "chat", "max_tokens": 48, "messages": [{"role": "user", "content": question}]}
    fs("invoke", "chat", json.dumps(body), "--path", "/v1/chat/completions", "--stream")


def fs(*arguments: str, captured: bool = False) -> str:
    """Runs `fs` and shows the command; returns its stdout if it is asked for."""
    print(
        f"\n\x1b[1m$ fs {shlex.join(arguments)}\x1b[0m" if sys.stdout.isatty() else f"\n$ fs {shlex.join(arguments)}",
        flush=True,
    )
    # What is asked for is captured and shown; everything else goes to the terminal as it comes.
    result = subprocess.run([FS, *arguments], cwd=ROOT, env=environment(), stdout=subprocess.PIPE if captured else None)
    if captured:
        print(result.stdout.decode(), end="", flush=True)
    if result.returncode:
        sys.exit(f"fs {arguments[0]} ended with {result.returncode}; logs are in {HOME / 'logs'}")
    return result.stdout.decode() if captured else ""


def title(text: str) -> None:
    print(f"\n── {text}", flush=True)


def clean(before: set[Path]) -> list[str]:
    """Stops everything and says what is still there."""
    failed = sys.exc_info()[0] is not None
    subprocess.run([FS, "down"], cwd=ROOT, env=environment(), check=False)
    if failed:
        for log in sorted((HOME / "logs").glob("*.log")):
            print(f"\n── {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    shutil.rmtree(HOME, ignore_errors=True)
    ends = time.monotonic() + GONE_S
    while (processes := ours()) and time.monotonic() < ends:
        time.sleep(0.05)
    files = sorted(map(str, ours_on_disk() - before))
    return [*(f"process {line}" for line in processes), *files, *([str(HOME)] if HOME.exists() else [])]


def ours_on_disk() -> set[Path]:
    """What carries our name where temporary things lie."""
    return {path for folder in SHARED for path in folder.glob("*fleetstart*") if path != HOME}


def ours() -> Sequence[str]:
    """Processes that were started with our FS_HOME."""
    mark = f"FS_HOME={HOME}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {command}")
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
