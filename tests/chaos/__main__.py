"""Chaos: calls of every kind at two gateways while parts are killed, stopped, cut off and starved; then the verdict.

    python -m tests.chaos --seconds 600 --seed 7

Prints the faults with their times and the verdict. The history of a run that found something is kept. Takes root: hosts
are network namespaces, disks are small file systems of a mount namespace of its own. Ends with 1 if there are findings.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis

from fleetstart.controller.schemas.functions import LedgerLine
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, dollars
from tests.chaos.bed import ChaosBed
from tests.chaos.checker import Finding, check
from tests.chaos.clients import Clients
from tests.chaos.faults import Faults
from tests.chaos.history import Answered, Fault, Invoked, Ran, Recorder, Row, Settled, now_s
from tests.chaos.schedule import LASTS_S, Planned, plan
from tests.servers import wait_until

OWN = "FS_CHAOS_OWN_MOUNTS"
SETTLED_S = 60.0
"""From the end of the last fault until every call has ended and every row is there."""
LEAST_ANSWERED = 0.3
"""Share of calls that must have been answered well: with less, the run shows nothing."""
TERMINAL = ("succeeded", "failed", "cancelled", "expired")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Calls under faults, and the verdict.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--scale", type=float, default=1.0, help="of the faults' lengths and of the pauses between")
    parser.add_argument("--kinds", default="", help=f"only these, separated by commas: {', '.join(LASTS_S)}")
    parser.add_argument("--keep", type=Path, default=Path("build/chaos"), help="folder for histories with findings")
    parser.add_argument("--model", action="store_true", help="also stream from a language model")
    options = parser.parse_args()
    if OWN not in os.environ:
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        return subprocess.run(argv, env={**os.environ, OWN: "1"}).returncode
    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    faults = plan(options.seed, options.seconds, scale=options.scale, kinds=kinds)
    print(f"seed {options.seed}: {options.seconds:g} s, {len(faults)} faults", flush=True)
    return Run(options.seed, options.seconds, faults, options.keep, model=options.model).run()


class Run:
    def __init__(
        self, seed: int, seconds: float, planned: Sequence[Planned], keep: Path, *, model: bool = False
    ) -> None:
        self._seed = seed
        self._model = model
        self._seconds = seconds
        self._planned = planned
        keep.mkdir(parents=True, exist_ok=True)
        self._path = keep / f"history-{seed}.jsonl"
        self._path.unlink(missing_ok=True)
        self._history = Recorder(self._path)
        self._runs = 0
        self.dead_letters = 0
        self._ends: dict[str, Settled] = {}
        """Of accepted async calls, as they stood last."""
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s  {text}", flush=True)

    def run(self) -> int:
        try:
            with self._bed() as bed:
                findings, rows = self._on(bed)
                self._say_findings(findings)
                if findings:
                    self._keep_logs(bed)
        finally:
            self._history.close()
        self._report(findings, rows)
        return 1 if findings else 0

    def _bed(self) -> ChaosBed:
        return ChaosBed(self._on_run, model=self._model)

    def _on(self, bed: ChaosBed) -> tuple[list[Finding], list[Row]]:
        bed.deploy()
        text = bed.deploy_model() if self._model else ""
        key = self._admin(bed)
        clients = Clients(bed.urls, key, self._history, self._seed, model_text=text)
        faults = Faults(bed, self._history, self.say)
        self.say("the system is up, and calls begin")
        faults.start()
        clients.start(lambda: leader(bed.redis()))
        began_s = time.monotonic()
        for planned in self._planned:
            time.sleep(max(0.0, began_s + planned.at_s - time.monotonic()))
            faults.inject(planned)
        time.sleep(max(0.0, began_s + self._seconds - time.monotonic()))
        clients.stop()
        faults.close()
        self.say(f"calls have ended: {dict(sorted(clients.told.items()))}")
        findings = [Finding("no_part_ends_by_itself", text) for text in faults.unexpected]
        rows = self._settle(bed, findings)
        findings += check(self._history.events, rows)
        answered = sum(count for what, count in clients.told.items() if what.split()[1] in ("200", "202"))
        if answered < LEAST_ANSWERED * clients.told.total():
            findings.append(Finding("calls_are_answered", f"{answered} of {clients.told.total()} calls"))
        return findings, rows

    def _admin(self, bed: ChaosBed) -> str:
        made = bed.http.post("/api/v1/keys", json={"name": "admin", "rights": ["admin"]}).raise_for_status()
        key = str(made.json()["key"])
        bed.http.headers["authorization"] = f"Bearer {key}"
        return key

    def _on_run(self, told: dict[str, object]) -> int:
        self._runs += 1
        number = self._runs
        self._history.write(
            Ran(
                at_s=now_s(),
                run=number,
                ticket=str(told["ticket"]),
                request=str(told["request"]),
                version=int(str(told["version"])),
                attempt=int(str(told["attempt"])),
            )
        )
        return number

    # ── the end ────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, bed: ChaosBed, findings: list[Finding]) -> list[Row]:
        """Waits until nothing is under way; then reads how all stands."""
        began_s = time.monotonic()
        for what, done in (
            ("both gateways are ready", lambda: all(ready(url) for url in bed.urls)),
            ("no call is open", lambda: not _open(bed.redis())),
            ("async calls have ended", lambda: all(each.status in TERMINAL for each in self._settled(bed))),
        ):
            try:
                wait_until(lambda done=done: quietly(done), SETTLED_S, what=what)  # type: ignore[misc]
            except AssertionError as error:
                findings.append(Finding("settles", f"{error}; {_left_open(bed.redis())}; {self._unended(bed)}"))
        self.say(f"settled in {time.monotonic() - began_s:.1f} s")
        for each in self._settled(bed):
            self._history.write(each)
            self.dead_letters += each.dead_letter
        lines = bed.http.get("/api/v1/ledger", timeout=60).raise_for_status().content.splitlines()
        rows = [msgspec.json.decode(line, type=LedgerLine).row for line in lines]
        return [
            Row(id=row.id, status=row.status, version=row.version, cost=dollars(row.cost_nusd))
            for row in rows
            if isinstance(row, InvocationRow)
        ]

    def _unended(self, bed: ChaosBed) -> str:
        """Some async calls that have not ended, with their history: for the finding."""
        left = [each.request for each in self._ends.values() if each.status not in TERMINAL]
        return " ".join(bed.http.get(f"/api/v1/invocations/{request}").text for request in left[:3])

    def _settled(self, bed: ChaosBed) -> list[Settled]:
        events = self._history.events
        asynchronous = {event.call for event in events if isinstance(event, Invoked) and event.kind == "async"}
        accepted = [
            event.request
            for event in events
            if isinstance(event, Answered) and event.status == 202 and event.call in asynchronous
        ]
        for request in accepted:
            if (known := self._ends.get(request)) is not None and known.status in TERMINAL:
                continue
            answer = bed.http.get(f"/api/v1/invocations/{request}")
            body: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
            result = body.get("result")
            run = result.get("run", 0) if isinstance(result, dict) else 0
            self._ends[request] = Settled(
                at_s=now_s(),
                request=request,
                status=body.get("status", ""),
                run=run,
                code=(body.get("error") or {}).get("code", ""),
                dead_letter=bool(body.get("dead_letter")),
            )
        return list(self._ends.values())

    def _keep_logs(self, bed: ChaosBed) -> None:
        for part in bed.parts:
            shutil.copy(part.log_path, self._path.with_name(f"{self._path.stem}-{part.name}.log"))

    def _say_findings(self, findings: Sequence[Finding]) -> None:
        for rule, count in Counter(finding.rule for finding in findings).items():
            texts = [finding.text for finding in findings if finding.rule == rule]
            print(f"FOUND {rule}: {count}")
            print("\n".join(f"  {text}" for text in texts[:10]), flush=True)

    def _report(self, findings: Sequence[Finding], rows: Sequence[Row]) -> None:
        events = self._history.events
        kinds = Counter(event.kind for event in events if isinstance(event, Fault))
        injected = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        print(
            f"history: {len(events)} events, {self._runs} runs, {len(rows)} rows; faults: {kinds.total()} ({injected})"
        )
        if findings:
            with self._path.with_suffix(".rows").open("wb") as file:
                file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
            print(f"the history is in {self._path}; repeat with SEED={self._seed} SECONDS={self._seconds:g}")
        else:
            self._path.unlink()
            print("nothing found")


def leader(client: redis.Redis) -> tuple[int, str]:
    with client, client.pipeline(transaction=True) as pipe:
        pipe.get(keys.FENCE)
        pipe.get(keys.LEADER)
        fence, leader = pipe.execute()
    return int(fence or 0), leader.decode() if leader else ""


def _open(client: redis.Redis) -> int:
    with client:
        count: Any = client.hlen(keys.OPEN)
        late: Any = client.xlen(keys.LEDGER_LATE)
    return int(count) + int(late)


def _left_open(client: redis.Redis) -> str:
    """What is open still, and the gateways that there are: for the finding."""
    with client:
        calls: Any = client.hvals(keys.OPEN)
        late: Any = client.xlen(keys.LEDGER_LATE)
        gateways = [key.decode() for key in client.scan_iter(f"{keys.GATEWAY_PREFIX}*")]
    texts = [call.decode(errors="replace") for call in calls[:10]]
    return f"{len(calls)} open, {late} late; gateways {', '.join(gateways)}; {' '.join(texts)}"


def ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", trust_env=False, timeout=2).status_code == 200


def quietly(done: Any) -> bool:
    try:
        return bool(done())
    except (httpx.HTTPError, redis.RedisError):
        return False


if __name__ == "__main__":
    sys.exit(main())
