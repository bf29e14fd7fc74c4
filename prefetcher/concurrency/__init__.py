"""Threads beside the daemon's event loop: blocking calls, and a second loop for network traffic."""
