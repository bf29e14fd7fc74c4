"""Bringing chunks: order, progress, retries, bandwidth."""
