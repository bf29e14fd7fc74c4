"""The Redis server behind the state: what it may hold, how it is set up, who it is, and its shared readers."""
