"""HTTP and ASGI helpers without any decision of the domain."""
