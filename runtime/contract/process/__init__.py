"""Conventions of every process: logs, redaction, task groups."""
