"""Fetching chunks into segments: order, progress, sources, retries, bandwidth."""
