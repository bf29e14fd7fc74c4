"""No capture of a CUDA graph while engines are built, and no build during a capture."""

from __future__ import annotations

import threading

from fleetstart.runtime.llm.engine.capture_gate import CaptureGate


def test_builds_go_on_beside_each_other_and_no_capture_does() -> None:
    gate = CaptureGate()
    with gate.building():
        with gate.building(), gate.capturing() as allowed:
            assert not allowed
        with gate.capturing() as allowed:
            assert not allowed
    with gate.capturing() as allowed:
        assert allowed


def test_a_build_waits_for_the_capture_under_way() -> None:
    gate, built = CaptureGate(), threading.Event()

    def build() -> None:
        with gate.building():
            built.set()

    with gate.capturing() as allowed:
        assert allowed
        builder = threading.Thread(target=build)
        builder.start()
        with gate.capturing() as second:
            assert not second
        assert not built.is_set()
    assert built.wait(10)
    builder.join(10)
