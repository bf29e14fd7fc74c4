"""Distributed LLM: pipeline stages, consolidation, request migration."""
