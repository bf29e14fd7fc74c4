"""Peers and the parameter pool: who holds which chunks, who reads them from whom, and which copies are kept."""
