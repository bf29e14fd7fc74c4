"""Hints about the function's network, from the errors that its absence really causes."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from fleetstart.runtime.worker_io.network_hint import network_hint


def failure(url: str) -> Exception:
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen(url, timeout=5)
    return caught.value


def test_a_name_that_cannot_be_resolved_leads_to_the_setting() -> None:
    error = failure("http://no-such-host.invalid/")
    assert network_hint(error, False) == (
        'this function has no network: allow the host with @function(network=["HOST"]), or all with network=True'
    )
    assert "reaches api.example.com alone" in network_hint(error, ["api.example.com"])
    assert network_hint(error, True) == ""


def test_an_address_without_a_route_does_too() -> None:
    try:
        raise OSError(101, "Network is unreachable")
    except OSError:
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError("the client's own") from None
    assert "no network" in network_hint(caught.value, False), "the context is followed, though it is not shown"


def test_other_errors_have_other_causes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert network_hint(failure(f"http://127.0.0.1:{port}/"), False) == ""
    assert network_hint(KeyError("host"), False) == ""


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert network_hint(one, False) == ""
