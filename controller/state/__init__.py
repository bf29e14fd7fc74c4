"""What lies in Redis, the in-memory view of it, and how the two are kept in step."""
