"""Rules of who may call whom, for how long, and under which key: decisions about calls from function to function."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.function_calls.rules import (
    call_headers,
    caller_of,
    check_chain,
    check_declared,
    check_request,
    missing_callees,
    repeat_key,
    time_left_s,
)
from fleetstart.runtime.contract.billing.ledger import TraceContext
from fleetstart.runtime.contract.errors import (
    CallLoop,
    CallNotDeclared,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
)
from fleetstart.runtime.contract.function.names import DEFAULT_PROJECT, full_name
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function_calls import DEPTH_MAX, CallRequest
from fleetstart.runtime.contract.ids import BundleId, FunctionName

FUNCTIONS = ("search.ask", "search.embed", "search.index", "ml.chat", "chat")
SECOND_NS = 1_000_000_000


def spec(**settings: Any) -> FunctionSpec:
    name = full_name("ask", settings.get("project", DEFAULT_PROJECT))
    return FunctionSpec(name=name, bundle=BundleId("b"), entry="handler:ask", **settings)


def request(**changes: Any) -> CallRequest:
    plain = CallRequest(grant="g", function="embed", method="POST", path="/", number=0, has_body=True)
    return msgspec.structs.replace(plain, **changes)


def test_a_function_may_call_what_it_declares_in_its_project_and_do_nothing_else() -> None:
    caller = caller_of(spec(project="search", calls=["embed", "ml.chat"]))
    caller.require_right("invoke", "calling functions")
    caller.require_existing("search.embed", FUNCTIONS)
    for hidden in ("ml.chat", "chat", "embed", "search.index", "search.absent"):  # of others, not declared, not there
        with pytest.raises(NotFound):
            caller.require_existing(hidden, FUNCTIONS)
    for right in ("read", "deploy", "node", "admin"):
        with pytest.raises(Forbidden):
            caller.require_right(right, "it")
    assert caller.limited
    assert caller.key is not None
    assert not caller.key.credentials  # no text proves it: only the gateway makes such a caller


def test_a_callee_that_is_not_declared_is_rejected_with_the_line_to_write() -> None:
    check_declared(spec(calls=["embed"]), "embed")
    with pytest.raises(CallNotDeclared, match="ask calls chat, which its setting `calls` does not name") as rejected:
        check_declared(spec(calls=["embed"]), "chat")
    assert "calls=['embed', 'chat']" in rejected.value.hint
    with pytest.raises(CallNotDeclared, match="it names none"):
        check_declared(spec(), "chat")


@given(st.integers(1, 2 * DEPTH_MAX))
def test_a_chain_is_rejected_from_the_ninth_function_on(length: int) -> None:
    chain = [f"f{number}" for number in range(length)]
    if length <= DEPTH_MAX:
        check_chain(chain, "last")
    else:
        with pytest.raises(CallLoop, match=f"{length} functions deep, {DEPTH_MAX} at most: f0 → f1"):
            check_chain(chain, "last")


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=DEPTH_MAX, unique=True), st.data())
def test_a_circle_is_rejected_whatever_its_length(chain: list[str], data: st.DataObject) -> None:
    with pytest.raises(CallLoop, match="in a circle") as rejected:
        check_chain(chain, data.draw(st.sampled_from(chain)))
    assert rejected.value.status == 508


@given(st.integers(-5, 100), st.none() | st.floats(-1, 200))
def test_a_callee_never_has_more_time_than_its_caller(left_s: int, asked_s: float | None) -> None:
    ends_ns = 7 * SECOND_NS + left_s * SECOND_NS
    if left_s <= 0:
        with pytest.raises(DeadlineExceeded, match="embed was not called"):
            time_left_s("embed", ends_ns, asked_s, 7 * SECOND_NS)
        return
    given_s = time_left_s("embed", ends_ns, asked_s, 7 * SECOND_NS)
    assert given_s == (min(left_s, asked_s) if asked_s is not None and asked_s > 0 else left_s)


def test_what_the_platform_alone_knows_no_function_can_say() -> None:
    given = [
        ("X-Own", "1"),
        ("Fs-Scheduled-At", "2026-01-01T00:00:00Z"),
        ("tracestate", "a=b"),
        ("connection", "close"),
    ]
    assert call_headers(request(headers=given), TraceContext()) == [(b"x-own", b"1")]


@given(st.binary(max_size=8), st.integers(0, 3), st.sampled_from(["embed", "index"]), st.sampled_from(["/", "/a"]))
def test_the_same_call_of_a_repeated_caller_has_the_same_key_and_every_other_its_own(
    body: bytes, number: int, callee: str, path: str
) -> None:
    call = request(function=callee, path=path, number=number)
    again = msgspec.structs.replace(call, grant="of another attempt")
    key = repeat_key("caller's", FunctionName("ask"), call, body)
    assert repeat_key("caller's", FunctionName("ask"), again, body) == key
    others = [
        repeat_key("another", FunctionName("ask"), call, body),
        repeat_key("caller's", FunctionName("tell"), call, body),
        repeat_key("caller's", FunctionName("ask"), msgspec.structs.replace(call, number=number + 1), body),
        repeat_key("caller's", FunctionName("ask"), msgspec.structs.replace(call, path="/other"), body),
        repeat_key("caller's", FunctionName("ask"), call, body + b"x"),
    ]
    assert len({key, *others}) == 6
    assert len(key) <= 255


@pytest.mark.parametrize("path", ["/", "/v1/embeddings?x=1&y=%20", "/a/../b"])
def test_a_path_below_the_callee_is_taken(path: str) -> None:
    check_request(request(path=path, headers=[("x-own", "any text, \xe4 too")]))


@pytest.mark.parametrize(
    "broken",
    [
        {"path": "-private"},  # would make the name another function's
        {"path": ""},
        {"path": "/a b"},
        {"path": "/a\r\nhost: x"},
        {"path": "/ä"},
        {"method": "GET /"},
        {"headers": [("x-own\n", "")]},
        {"headers": [("x-own", "a\r\nfs-key: b")]},
        {"headers": [("x-own", "→")]},
        {"headers": [("Prefer", "respond-async")]},
    ],
)
def test_a_request_that_http_does_not_have_is_rejected(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"of a call|function's call"):
        check_request(request(**broken))


def test_a_deploy_is_warned_of_callees_that_are_not_there() -> None:
    assert missing_callees(spec(project="search", calls=["embed"]), FUNCTIONS) == ""
    warning = missing_callees(spec(project="search", calls=["search.embed", "ml.chat", "absent"]), FUNCTIONS)
    assert warning == "function search.ask calls ml.chat, search.absent, which project search does not have yet"
