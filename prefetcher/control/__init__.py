"""Exchange with the controller through Redis: reads orders; writes statuses, logs, ledger rows and the node's lease."""
