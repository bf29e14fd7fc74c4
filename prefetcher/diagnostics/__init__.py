"""Throughput measurements for `fs doctor`."""
