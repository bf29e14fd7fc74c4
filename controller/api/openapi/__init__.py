"""OpenAPI documents: of the management API (`document`), and of one function's calls (`invoke_document`)."""
