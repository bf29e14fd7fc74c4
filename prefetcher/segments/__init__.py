"""Shared-memory segments: open, fill, evict, disk cache."""
