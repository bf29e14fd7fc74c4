"""Backup of what a system cannot compute again: which records belong to it, its file, and how it is restored."""
