"""Checkpoints: published from weight files, verified and exported."""
