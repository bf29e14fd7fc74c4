"""Input and output of a worker: ASGI messages, tagged log lines, user-facing errors."""
