"""Limits of projects: how many workers each of their versions may have."""
