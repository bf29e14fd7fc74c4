"""`python -m tests.testbed`: runs a bed by hand. `fs` works against it from another terminal; commands go in here."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from tests.testbed.bed import Place, Testbed
from tests.testbed.network import NoNamespaces, NotDone

COMMANDS = """commands, one a line; a HOST is a node's number, `store` or `control`
  status                   a line for each node
  cut HOST [HOST]          pull its cable; with two, part only these two
  mend HOST [HOST]         put it right again
  part | join              no node reaches another one, or all do
  limit HOST MBIT          another rate for its link, 0 for none
  kill N | stop N | start N | pause N | resume N    its node daemon
  lose N                   all its processes at once, as without power
  stall | unstall          the store
  chill                    nodes start anew and forget all weights
  log HOST                 the end of its log
  quit                     as Ctrl-C and SIGTERM do"""


class Shell:
    """Words of a line in, a text to print out."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self._verbs: dict[str, Callable[..., object]] = {
            "status": self.status,
            "cut": lambda *hosts: self._link(bed.cut, bed.cut_between, hosts),
            "mend": lambda *hosts: self._link(bed.mend, bed.mend_between, hosts),
            "limit": lambda host, mbit: bed.limit(_place(host), float(mbit)),
            "part": bed.part,
            "join": bed.join,
            "stall": bed.stall_store,
            "unstall": bed.resume_store,
            "chill": bed.chill,
            "log": self.log,
            "help": lambda: COMMANDS,
        }
        for verb in ("kill", "stop", "start", "pause", "resume", "lose"):
            self._verbs[verb] = lambda node, verb=verb: getattr(bed.node(_place(node)), verb)()

    def obey(self, line: str) -> str:
        words = line.split()
        if not words:
            return ""
        if words[0] not in self._verbs:
            return f"no command {words[0]!r}\n{COMMANDS}"
        try:
            return str(self._verbs[words[0]](*words[1:]) or "done")
        except (AssertionError, NotDone, TypeError, ValueError, OSError, StopIteration) as error:
            return f"{words[0]}: {error or type(error).__name__}"

    def status(self) -> str:
        return "\n".join(self._line(index) for index in range(len(self.bed.nodes)))

    def log(self, host: str) -> str:
        named = self.bed.host(_place(host))
        return "\n".join(part.log_tail() for part in self.bed.parts if part.host == named)

    def _link(self, one: Callable[[Place], None], two: Callable[[Place, Place], None], hosts: Sequence[str]) -> None:
        places = [_place(host) for host in hosts]
        (one if len(places) == 1 else two)(*places)

    def _line(self, index: int) -> str:
        node, report = self.bed.node(index), self.bed.report(index)
        words = [node.name, f"{node.address:<12}"]
        if report is None:
            return " ".join([*words, "no lease", "" if node.alive else "(its daemon does not run)"])
        weights = sum(segment.ready_bytes for segment in report.segments) / 1e6
        workers = [status.state for status in node.statuses()]
        words += [f"memory {report.memory_used_bytes / 2**20:.0f} of {report.memory_bytes / 2**20:.0f} MiB,"]
        words += [f"weights {weights:.0f} MB,", f"profiles {', '.join(report.profiles)},"]
        return " ".join([*words, f"workers {', '.join(workers) or 'none'}", "" if node.alive else "(just ended)"])


def _place(word: str) -> Place:
    return int(word) if word.isdecimal() else word


def wait_for_end(shell: Shell, ended: socket.socket) -> None:
    """Obeys what is typed until a signal comes; with nothing to read from, waits for the signal alone."""
    inputs: list[int | socket.socket] = [ended, sys.stdin.fileno()]
    typed = b""
    while True:
        ready, _, _ = select.select(inputs, [], [])
        if ended in ready:
            return
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            inputs.pop()
        *lines, typed = (typed + data).split(b"\n")
        for line in lines:
            if line.strip() in (b"quit", b"exit"):
                return
            print(shell.obey(line.decode(errors="replace")), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.testbed",
        description="Hosts as network namespaces on one machine, with a node daemon each, a store, Redis and a "
        "controller. Runs until Ctrl-C and leaves nothing behind.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=4, help="hosts with a node daemon (default: 4)")
    parser.add_argument("--mbit", type=float, default=200, help="rate of each one's link, each way (default: 200)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting for controller and nodes, such as FS_NODE_MEMORY=8GiB or FS_DISK_CACHE=20GiB; may be repeated",
    )
    options = parser.parse_args()
    if wrong := [setting for setting in options.env if "=" not in setting]:
        parser.error(f"--env {wrong[0]}: NAME=VALUE is needed")
    env = dict(setting.split("=", 1) for setting in options.env)
    ended, waker = socket.socketpair()
    waker.setblocking(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    try:
        with Testbed(nodes=options.nodes, mbit=options.mbit, env=env) as bed:
            shell = Shell(bed)
            print(f"export FS_URL={bed.url}")
            print(f"# fs deploy examples/hello/handler.py; fs invoke hello; files in {bed.folder}")
            print(f"{shell.status()}\n{COMMANDS}", flush=True)
            wait_for_end(shell, ended)
    except NoNamespaces as error:
        print(f"no test bed here: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
