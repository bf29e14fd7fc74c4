"""Chunks between nodes: the server of a holder, and the chunk source of its readers."""
