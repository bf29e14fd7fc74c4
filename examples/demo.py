"""`make demo`: a language model is deployed, woken from zero, answers, and is billed; then nothing is left.

Everything is done by the `fs` commands that are printed, in a fresh FS_HOME inside the checkout. The demo fails
if a command fails, or if a process, a file in /dev/shm or the folder itself outlives it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".fleetstart"
FS = str(Path(sys.executable).with_name("fs"))
SHARED_MEMORY = Path("/dev/shm")
GONE_S = 10.0
"""How long a process may take to be gone after `fs down`."""


def main() -> int:
    shared_before = set(SHARED_MEMORY.iterdir())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(HOME, ignore_errors=True)
    try:
        play()
    finally:
        left = clean(shared_before)
    for what in left:
        print(f"left behind: {what}", file=sys.stderr)
    return 1 if left else 0


def play() -> None:
    url = fs("up", "--port", "0").strip()
    os.environ["FS_URL"] = url
    title("Deploy: the handler is read, not run; its weights become a checkpoint in the store")
    function_url = fs("deploy", "examples/chat/handler.py").strip()
    title("The first call finds nothing running: it waits for a worker and for 269 MB of weights")
    ask("Why is the sky blue? Answer in one sentence.")
    title("Where the time of that call went")
    fs("trace", "chat")
    title("The second call finds a hot worker")
    ask("Name three colours of the rainbow.")
    title("The bill: calls are billed, starting and fetching is not")
    fs("usage")
    print(f"\nAny OpenAI client can use {function_url}/v1", flush=True)


def ask(question: str) -> None:
    body = {"model": "chat", "max_tokens": 48, "messages": [{"role": "user", "content": question}]}
    fs("invoke", "chat", json.dumps(body), "--path", "/v1/chat/completions", "--stream")


def fs(*arguments: str) -> str:
    """Runs `fs`, shows the command and what it prints as it comes, and returns its stdout."""
    print(
        f"\n\x1b[1m$ fs {shlex.join(arguments)}\x1b[0m" if sys.stdout.isatty() else f"\n$ fs {shlex.join(arguments)}",
        flush=True,
    )
    process = subprocess.Popen(
        [FS, *arguments], cwd=ROOT, env={**os.environ, "FS_HOME": str(HOME)}, stdout=subprocess.PIPE
    )
    out = b""
    assert process.stdout is not None
    with process.stdout:
        while block := os.read(process.stdout.fileno(), 65_536):
            out += block
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
    if status := process.wait():
        sys.exit(f"fs {arguments[0]} ended with {status}; logs are in {HOME / 'logs'}")
    return out.decode()


def title(text: str) -> None:
    print(f"\n── {text}", flush=True)


def clean(shared_before: set[Path]) -> list[str]:
    """Stops everything and says what is still there."""
    failed = sys.exc_info()[0] is not None
    subprocess.run([FS, "down"], cwd=ROOT, env={**os.environ, "FS_HOME": str(HOME)}, check=False)
    if failed:
        for log in sorted((HOME / "logs").glob("*.log")):
            print(f"\n── {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    shutil.rmtree(HOME, ignore_errors=True)
    ends = time.monotonic() + GONE_S
    while (processes := ours()) and time.monotonic() < ends:
        time.sleep(0.05)
    shared = sorted(str(path) for path in set(SHARED_MEMORY.iterdir()) - shared_before)
    return [*(f"process {line}" for line in processes), *shared, *([str(HOME)] if HOME.exists() else [])]


def ours() -> Sequence[str]:
    """Processes that were started with our FS_HOME."""
    mark = f"FS_HOME={HOME}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(
                    f"{folder.name} {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
                )
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
