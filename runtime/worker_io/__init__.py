"""What every part of a worker speaks with: ASGI messages, tagged log lines, tracebacks for the function's author."""
