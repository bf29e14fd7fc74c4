"""Handler files: declarations, settings, bundle and FunctionSpec."""
