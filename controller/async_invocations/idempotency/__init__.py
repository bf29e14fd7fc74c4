"""Idempotency keys."""
