"""Threads beside the event loop: blocking calls, and a second loop for I/O."""
