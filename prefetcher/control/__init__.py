"""Orders in, statuses out: the node's side of Redis."""
