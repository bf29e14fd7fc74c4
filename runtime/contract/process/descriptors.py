"""Limit of open files of a process: servers need more than the usual 1,024."""

from __future__ import annotations

import resource

DESCRIPTORS_MAX = 65_536


def raise_descriptor_limit() -> None:
    """Raises the limit of open files of this process, and of those that it starts, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_MAX:
        return
    limit = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
