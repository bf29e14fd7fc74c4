from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.native import SlabPool
from tests.native.neighbours import SLAB, Child, Pages, Start, meminfo, spawn

RESERVED = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGES = 40


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
    before = int(RESERVED.read_text())
    try:
        RESERVED.write_text(str(before + HUGE_PAGES))
    except OSError as error:
        pytest.skip(f"hugetlb: no pages can be reserved: {error}")
    try:
        if meminfo("HugePages_Free") < HUGE_PAGES:
            pytest.skip(f"hugetlb: of {HUGE_PAGES} pages, {meminfo('HugePages_Free')} could be reserved")
        yield
    finally:
        RESERVED.write_text(str(before))


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
