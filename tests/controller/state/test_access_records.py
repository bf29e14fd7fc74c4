"""What the audit log says of a change: that there was one."""

from __future__ import annotations

from fleetstart.controller.state.access_records import digest
from fleetstart.controller.state.records import FunctionRecord
from fleetstart.runtime.contract.ids import FunctionName, Version


def test_any_record_has_a_digest_which_its_content_alone_decides() -> None:
    def record(split: dict[Version, int]) -> FunctionRecord:
        return FunctionRecord(name=FunctionName("f"), live=Version(1), deployed_unix_ms=0, split=split)

    canary = digest(record({Version(1): 90, Version(3): 10}))
    assert canary == digest(record({Version(3): 10, Version(1): 90}))
    assert len({canary, digest(record({})), digest(None)}) == 3
