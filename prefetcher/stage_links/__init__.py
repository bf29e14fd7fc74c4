"""Connections between pipeline stages: direct, or relayed through the object store."""
