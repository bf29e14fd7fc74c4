"""W3C Trace Context, by the cases of its specification and by anything else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.http.request_context import trace_context, traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FORM = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]")


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_a_callers_trace_is_gone_on_with(flags: str, sampled: bool) -> None:
    context = trace_context(f"00-{TRACE}-{SPAN}-{flags}".encode(), b"vendor=1,other=2", sample=not sampled)
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.state == "vendor=1,other=2"
    passed_on = traceparent(context).decode()
    assert passed_on == f"00-{TRACE}-{context.span_id}-{'01' if sampled else '00'}"
    assert context.span_id not in ("", SPAN)


def test_later_versions_may_say_more() -> None:
    assert trace_context(f"cc-{TRACE}-{SPAN}-01-more".encode(), None, sample=False).trace_id == TRACE


@pytest.mark.parametrize(
    "broken",
    [
        "", "00", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE[:-1]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)  # fmt: skip
def test_what_is_broken_begins_a_trace_of_its_own(broken: str) -> None:
    context = trace_context(broken.encode(), b"vendor=1", sample=True)
    assert context.trace_id != TRACE
    assert (context.parent_id, context.state, context.sampled) == ("", "", True)


@given(parent=st.binary(max_size=80), state=st.binary(max_size=600), sample=st.booleans())
def test_whatever_comes_in_what_goes_out_is_well_formed(parent: bytes, state: bytes, sample: bool) -> None:
    context = trace_context(parent, state, sample=sample)
    assert FORM.fullmatch(traceparent(context))
    assert len(context.state) <= 512
    assert context.state.isascii()
    assert "\n" not in context.state
