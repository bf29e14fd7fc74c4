"""From a slot on a worker to the last byte of the response."""
