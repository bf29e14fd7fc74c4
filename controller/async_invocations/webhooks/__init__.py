"""Webhooks: signing, secrets, delivery."""
