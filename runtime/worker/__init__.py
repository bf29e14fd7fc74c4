"""One worker process: shim, start, server, watchdog."""
