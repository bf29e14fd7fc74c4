"""State, payloads and events of async invocations."""
