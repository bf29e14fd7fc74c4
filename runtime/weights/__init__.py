"""Weights: tensors over a shared-memory segment, on the CPU and on CUDA."""
