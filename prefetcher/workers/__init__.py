"""The life of one worker on a node."""
