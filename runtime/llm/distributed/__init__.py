"""Pipeline stages, consolidation, request migration."""
