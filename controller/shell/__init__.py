"""Server side of `fs shell`."""
