"""Processes: fork server, prefork pool, control groups, logs."""
