"""Messages between controller, node and worker."""
