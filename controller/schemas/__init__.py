"""The structs of the management API, shared by API, CLI and billing."""
