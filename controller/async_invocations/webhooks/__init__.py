"""Signing, secrets, delivery."""
