"""Tensors over a segment, on the CPU and on CUDA."""
