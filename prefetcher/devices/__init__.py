"""The node's devices: which there are, and what workers have reserved of each."""
