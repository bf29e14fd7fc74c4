"""Test bed for cold starts that are pipelines: one for all tests, as it takes long to set up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pipelines.fleet import Fleet, Function, function_name, serving_fleet

HERE = Path(__file__).parent
ON_FOUR_HOSTS = ("test_relayed_pipelines.py", "test_multicast_starts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on all hosts come first: the others run three and lose some, and hosts would have to start again."""
    order = {HERE / name: place for place, name in enumerate(ON_FOUR_HOSTS)}
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[place] for place in places), key=lambda item: order.get(item.path, len(order)))
    for place, item in zip(places, mine, strict=True):
        items[place] = item


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
