"""Static reading of handler source."""
