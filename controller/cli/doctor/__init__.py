"""`fs doctor`: checks of this machine, and what limits the throughput of weight loads."""
