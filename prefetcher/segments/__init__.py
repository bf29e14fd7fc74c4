"""Segments: checkpoints in shared memory. Memory budget, eviction, disk cache."""
