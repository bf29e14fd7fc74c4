"""The daemon of a node: brings weights into segments, starts, meters and ends workers."""

__all__: list[str] = []
