"""The function spec, its interface and its egress policy."""
