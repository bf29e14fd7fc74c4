"""Engine over a model of transformers: our scheduler and sampler, the model's own forward pass, a paged KV cache."""
