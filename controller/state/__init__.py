"""State: the records in Redis, the in-memory view of them, and their synchronisation."""
