"""Links of nodes: contention among fetches, and the division of a fetch over its sources."""
