"""OpenAI routes over the engine."""
