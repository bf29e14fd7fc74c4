"""Tensor parallelism: one model over several devices of a node, with a process a device."""
