"""From a handler file to a FunctionSpec."""
