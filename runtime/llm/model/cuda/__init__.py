"""CUDA: graphs of decode steps, and the kernels of our own in them."""
