"""From request to handler to response."""
