"""What lies in Redis must be readable by those who come after."""

from __future__ import annotations

import msgspec

from fleetstart.controller.state.records import VersionRecord
from fleetstart.runtime.contract.ids import Version
from fleetstart.runtime.contract.weights.stage import LayerLayout
from tests.controller.scheduler.test_autoscaler import spec


def test_a_version_keeps_its_layout_and_an_old_record_has_none() -> None:
    record = VersionRecord(
        version=Version(1),
        digest="d",
        spec=spec(),
        segment_bytes=7,
        created_unix_ms=1,
        layout=LayerLayout(3, [2, 2], [(0, 1), (1, 2)], [(0, 1)]),
    )
    data = msgspec.json.encode(record)
    assert msgspec.json.decode(data, type=VersionRecord) == record
    old = data.replace(
        b',"layout":{"ends_bytes":3,"layer_bytes":[2,2],"layer_chunks":[[0,1],[1,2]],"ends_chunks":[[0,1]]}', b""
    )
    assert b"layout" not in old
    assert msgspec.json.decode(old, type=VersionRecord).layout is None
