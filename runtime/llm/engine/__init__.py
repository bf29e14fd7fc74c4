"""LLM engine: scheduler, KV block pool, sampler, step loop."""
