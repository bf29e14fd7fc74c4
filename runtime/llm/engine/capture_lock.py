"""Lock between captures of CUDA graphs and what breaks them, or is broken by them."""

from __future__ import annotations

import threading

CAPTURES = threading.Lock()
"""Held by a thread that captures a CUDA graph, and by one that builds another engine in the process: it waits for the
whole device and empties the allocator's cache, and neither is allowed beside a capture."""
