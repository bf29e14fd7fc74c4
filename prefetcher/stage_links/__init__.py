"""Connections between pipeline stages, direct or relayed."""
