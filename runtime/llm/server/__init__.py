"""LLM server: OpenAI-compatible routes over the engine."""
