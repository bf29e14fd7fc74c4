"""Worker processes: fork server, prefork pool, control groups, log pipes."""
