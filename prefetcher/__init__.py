"""The node daemon: loads weights into shared memory; starts, meters and ends the workers of its node."""

__all__: list[str] = []
