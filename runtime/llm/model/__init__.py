"""Model: configuration, layers, decoders, loading."""
