"""Grants of calls that may call others: whose they are, and when they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fleetstart.controller.gateway.dispatch.grants import Grant, Grants
from fleetstart.runtime.contract.ids import WorkerId

ONE, OTHER = WorkerId("w-one"), WorkerId("w-other")


def attempt(worker: WorkerId) -> Any:
    return SimpleNamespace(worker=SimpleNamespace(id=worker))


def issue(grants: Grants, worker: WorkerId = ONE) -> Grant:
    record: Any = None
    return grants.issue(record, attempt(worker))


def test_a_grant_is_found_by_its_secret_on_its_own_worker_only() -> None:
    grants = Grants("gw-1")
    grant, other = issue(grants), issue(grants, OTHER)
    assert grants.find(grant.secret, ONE) is grant
    assert grants.find(grant.secret, OTHER) is None
    assert grants.find(other.secret, ONE) is None
    assert grants.find("", ONE) is None
    assert grants.header(grant) == f"gw-1:{grant.secret}"


def test_a_grant_shows_its_secret_in_no_log() -> None:
    grant = issue(Grants("gw-1"))
    assert grant.secret not in repr(grant)


def test_the_end_of_a_grant_ends_what_was_called_with_it_once() -> None:
    grants = Grants("gw-1")
    grant, second = issue(grants), issue(grants)
    ended: list[str] = []
    grant.on_end.add(lambda: ended.append("cancelled"))
    grants.end(grant)
    grants.end(grant)
    assert ended == ["cancelled"]
    assert grant.ended
    assert grants.find(grant.secret, ONE) is None
    assert grants.any_of(ONE)
    grants.end(second)
    assert not grants.any_of(ONE)
