"""Pipeline protocol: links, frames and stage lifecycles, independent of the model."""
