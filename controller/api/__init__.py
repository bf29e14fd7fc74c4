"""The management API, one file a topic."""
