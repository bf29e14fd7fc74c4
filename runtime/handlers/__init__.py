"""Runs handlers: decodes a request into arguments, calls the handler, encodes its result."""
