"""Endpoint descriptions, and the OpenAPI documents: of the management API, and of one function's calls."""
