"""The data plane: ASGI app, router, WebSockets."""
