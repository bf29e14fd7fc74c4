"""Threads and a second event loop."""
