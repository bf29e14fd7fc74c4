"""Their state, payloads and events."""
