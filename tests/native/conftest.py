from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fleetstart.native import SlabPool
from tests.huge_pages import make_room, reserved
from tests.native.neighbours import SLAB, Child, Pages, Start, spawn

HUGE_PAGES = 40


@pytest.fixture(scope="package", autouse=True)
def only_what_is_new_is_collected() -> None:
    """Nothing that other tests left is looked at: these collect often, and a full collection may take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def room_for_huge_pages(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("pages") == "thp":
        make_room(4 * HUGE_PAGES)


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(code, *fds)` runs Python code in a process of its own, with the descriptors as `sys.argv[1:]`."""
    children: list[Child] = []

    def run(code: str, *descriptors: int) -> Child:
        children.append(spawn(code, *descriptors))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate(timeout=10)


@pytest.fixture(scope="session")
def reserved_pages() -> Iterator[None]:
    """Huge pages for these tests, reserved for as long as they run."""
    with reserved(HUGE_PAGES) as given:
        if not given:
            pytest.skip(f"hugetlb: {HUGE_PAGES} pages cannot be reserved")
        yield


@pytest.fixture(scope="session", params=["small", "thp", "hugetlb"])
def pages(request: pytest.FixtureRequest) -> Pages:
    """Each kind of pages that this machine gives us."""
    kind: Pages = request.param
    if kind == "hugetlb":
        request.getfixturevalue("reserved_pages")
    try:
        SlabPool("probe", pages=kind, slab_bytes=SLAB, capacity=1)
    except OSError as error:
        pytest.skip(f"{kind}: {error}")
    return kind
