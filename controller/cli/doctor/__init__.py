"""Checks and throughput."""
