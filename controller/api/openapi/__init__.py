"""The OpenAPI description of the management API, by topic; `document` puts it together.

A topic's module has its `STRUCTS`, which the handlers really use, and its `paths`.
"""
