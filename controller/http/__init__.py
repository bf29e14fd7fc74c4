"""HTTP and ASGI helpers that know nothing of functions and workers."""
