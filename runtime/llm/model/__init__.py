"""Decoder, layers, loading."""
