"""One worker process: assignment, start, call gate, HTTP server, watchdog."""
