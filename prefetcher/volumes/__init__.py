"""Commits of volumes: files that a worker sends, checked, stored and published as the next version."""
