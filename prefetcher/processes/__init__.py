"""Worker processes as the daemon sees them: fork server, prefork pool, control groups, log pipes."""
