"""Manifest, stages, LoRA rules, token table."""
