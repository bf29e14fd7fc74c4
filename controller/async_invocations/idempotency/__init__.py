"""Idempotency keys: one execution for all calls with the same key."""
