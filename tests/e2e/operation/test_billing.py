"""Ledger of a whole system: right to the last nano-dollar, whatever was killed."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from tests.e2e.billing import SEGMENT_ROWS, soak
from tests.e2e.systems import running
from tests.servers import wait_until

KEPT = """
from fleetstart.runtime import Scale, function

@function(memory="64MiB", tags={"team": "ml"}, scale=Scale(min=1, max=2, keep_alive_s=1))
def kept():
    return "here"

@function(memory="64MiB", scale=Scale(max=1, keep_alive_s=600))
def warm():
    return "here"
"""


def test_a_short_soak_leaves_every_row_once_and_the_invoice_is_their_sum() -> None:
    with running(env={"FS_PROFILES": "python", "FS_SEGMENT_ROWS": str(SEGMENT_ROWS)}) as system:
        killed = soak(system, calls=600, clients=4, pause_s=(0.5, 1.0), seed=7)
        assert killed


def test_idle_time_is_billed_where_it_was_asked_for_and_a_budget_ends_that_too() -> None:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy_file(system.source(KEPT, folder="kept"))
        for name in ("kept", "warm"):
            system.ok(name)

        def idle(name: str, *, billed: bool) -> bool:
            rows = [row for row in system.phases(name, "idle") if row.duration_ms > 1000]
            return any((row.cost_nusd > 0) == billed for row in rows)

        wait_until(lambda: idle("kept", billed=True) and idle("warm", billed=False), 30, what="idle rows")
        assert not idle("warm", billed=True)
        assert {row.cost_nusd for row in system.phases("kept") if row.phase != "idle"} == {0}
        shown = system.fs("usage", "--by", "function,phase").out
        assert re.search(r"kept +idle .*\$0\.0000", shown)
        assert re.search(r"warm +idle .*waived", shown)
        assert re.search(r"kept +start .*waived", shown)

        lines = system.fs("usage", "--by", "tag:team,day", "--csv").out.splitlines()
        assert lines[0] == (
            "tag:team,day,rows,duration_ms,waived_ms,cost_nusd,cost_usd,device_gib_ms,"
            "cpu_ms,memory_peak_bytes,received_bytes,sent_bytes,device_peak_bytes"
        )
        assert [line.partition(",")[0] for line in lines[1:]] == ["", "ml"]

        system.fs("budget", "set", "kept", "--usd", "0.000000001", "--per", "day")
        code, error = system.failed("kept")
        assert (code, error.code) == (402, "budget_spent")
        assert "budget   kept" in system.fs("status").out
        assert system.fs("invoke", "kept", code=1).err.count("renews at") == 1
        system.fs("budget", "rm", "kept")
        system.ok("kept")

        month = datetime.now(UTC).strftime("%Y-%m")
        bill = json.loads(system.fs("invoice", month, "--json").out)
        assert json.loads(system.fs("invoice", "--json").out)["lines"][0]["function"] == bill["lines"][0]["function"]
        assert bill["total_nusd"] == sum(line["cost_nusd"] for line in bill["lines"])
