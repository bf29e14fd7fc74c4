"""vLLM as an engine: a load format for our segments, the engine over vLLM's, and the warm-up of its fork server."""
