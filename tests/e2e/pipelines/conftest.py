"""Test bed for cold starts that are pipelines: one for all tests, as it takes long to set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.pipelines.fleet import Fleet, Function, function_name, serving_fleet


@pytest.fixture(scope="package")
def shared_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving_fleet(tmp_path_factory.mktemp("functions"), request.session) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """Three hosts with slow links. Tests leave the links whole and no function; a node may be dead."""
    shared_fleet.run_hosts(3)
    yield shared_fleet
    shared_fleet.remove_left()


@pytest.fixture
def function(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Function]:
    """A function that is cold everywhere, named after its test."""
    function = fleet.deploy(function_name(request))
    yield function
    fleet.remove(function)
