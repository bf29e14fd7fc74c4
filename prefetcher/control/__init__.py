"""The node's side of Redis: orders in, statuses, logs, ledger rows and the node's lease out."""
