"""Upgrade: two releases, each a wheel built from its commit, side by side on one Redis and one store, under load.

    python -m tests.upgrade --from v1.2 --to HEAD

A bed of two gateways and two nodes, made by the second release, goes back to the first one. Then its parts are ended in
order and started as the second one, one after the other, under calls of every kind; one gateway goes back in between,
as an operator does who is in doubt.
The history is checked as that of chaos is (docs/contributing.md), and nothing is excused: no part is killed. It takes
root. Ends with 1 if there are findings, and with 0 and a word if the clone does not have the commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from fleetstart.controller.cli.local.join import JoinRecord, end_drain
from fleetstart.runtime.contract.node.orders import FINAL
from tests.chaos.__main__ import OWN, Run, leader, quietly, ready
from tests.chaos.bed import ChaosBed
from tests.chaos.checker import Finding, check
from tests.chaos.clients import Clients
from tests.chaos.history import Answered, Invoked, Row
from tests.servers import wait_until
from tests.testbed.parts import START_S, Node, Part
from tests.upgrade.builds import Build, NoSuchCommit, build

SIDE_BY_SIDE_S = 6.0
"""Time under load after each step."""
DRAINED_S = 60.0
GOOD = frozenset((0, 200, 202))
"""0 is no answer: the bed keeps the address of a gateway that is not there, and a request waits for the next one."""
TOLD = "unavailable"
"""Answer of a controller that shuts down to calls that outlive its time to drain: they may be sent again."""
REFUSED = frozenset((401, 403))
"""What a revoked key gets."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description="An upgrade in place, under load.")
    parser.add_argument("--from", dest="before", default="HEAD~100", help="commit or tag of the first release")
    parser.add_argument("--to", dest="after", default="HEAD", help="commit or tag of the second one")
    parser.add_argument("--seconds", type=float, default=SIDE_BY_SIDE_S, help="time under load after each step")
    parser.add_argument("--plain", action="store_true", help="FS_LINKS=plain, as from releases without certificates")
    parser.add_argument("--keep", type=Path, default=Path("build/upgrade"), help="folder for histories with findings")
    options = parser.parse_args()
    try:
        before, after = build(options.before), build(options.after)
    except NoSuchCommit as error:
        print(f"SKIPPED: {error}\nThis clone may be shallow; name another commit with --from.")
        return 0
    if OWN not in os.environ:
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "tests.upgrade", *sys.argv[1:]]
        return subprocess.run(argv, env={**os.environ, OWN: "1"}).returncode
    print(f"from {before.commit[:9]}, {before.title}\n  to {after.commit[:9]}, {after.title}", flush=True)
    return Upgrade(before, after, options.seconds, options.keep, plain=options.plain).run()


class Upgrade(Run):
    def __init__(self, before: Build, after: Build, seconds: float, keep: Path, *, plain: bool = False) -> None:
        super().__init__(0, seconds, (), keep)
        self._links = {"FS_LINKS": "plain"} if plain else {}
        self._before, self._after = before, after

    def _bed(self) -> ChaosBed:
        bed = ChaosBed(self._on_run)
        for part in (*bed.controllers, *bed.nodes):
            _run_by(part, self._after)  # whose words for joining and deploying the bed knows
            part.env = {**part.env, **self._links, "FS_DRAIN_S": "4"}  # less than the bed waits before it kills
        return bed

    def _on(self, bed: ChaosBed) -> tuple[list[Finding], list[Row]]:
        bed.deploy()
        for part in (*bed.nodes, *bed.controllers):
            self._change(bed, part, self._before)
        clients = Clients(bed.urls, self._admin(bed), self._history, self._seed)
        clients.start(lambda: leader(bed.redis()))
        self.say("all of the first release, and calls begin")
        time.sleep(self._seconds)
        old_gateway, gateway = bed.controllers
        old_node, node = bed.nodes
        for part, release in (
            (node, self._after),
            (gateway, self._after),
            (gateway, self._before),
            (gateway, self._after),
            (old_gateway, self._after),
            (old_node, self._after),
        ):
            self._change(bed, part, release)
            time.sleep(self._seconds)
        clients.stop()
        self.say(f"calls have ended: {dict(sorted(clients.told.items()))}")
        findings: list[Finding] = []
        rows = self._settle(bed, findings)
        return findings + check(self._history.events, rows) + self._failed(), rows

    def _change(self, bed: ChaosBed, part: Part, release: Build) -> None:
        """As docs/operations.md says: a node is drained first, and `fs node join` of the same FS_HOME ends that."""
        drained = f"/api/v1/nodes/{part.host}/drain"
        if isinstance(part, Node):
            bed.http.put(drained).raise_for_status()
            wait_until(lambda: all(one.state in FINAL for one in part.statuses()), DRAINED_S, what="its last worker")
        part.stop()
        _run_by(part, release)
        if isinstance(part, Node):
            redis_url = f"unix://{bed.folder / 'redis.sock'}"
            end_drain(JoinRecord(url="", redis_url=redis_url, store="", node=part.id, address=part.address))
        part.start()
        if isinstance(part, Node):
            part.wait_ready()
            wait_until(lambda: part.id not in bed.status().draining, what=f"{part.name} to have workers again")
        else:
            url = f"http://127.0.0.1:{part.env['FS_URL'].rpartition(':')[2]}"
            wait_until(lambda: quietly(lambda: ready(url)), START_S, what=f"{part.name} to be ready")
        self.say(f"{part.host} runs the {'second' if release is self._after else 'first'} release")

    def _failed(self) -> list[Finding]:
        """Calls that were not answered well: none has a fault to blame."""
        asked = {event.call: event for event in self._history.events if isinstance(event, Invoked)}
        failed: Counter[str] = Counter()
        for event in self._history.events:
            if isinstance(event, Answered) and event.status not in GOOD and event.code != TOLD:
                kind = asked[event.call].kind
                if kind != "probe" or event.status not in REFUSED:
                    failed[f"{kind} {event.status} {event.code} {event.text[:150]}".strip()] += 1
        return [Finding("no_call_fails", f"{count} times {what}") for what, count in failed.items()]


def _run_by(part: Part, release: Build) -> None:
    part.argv = (str(release.python), *part.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
