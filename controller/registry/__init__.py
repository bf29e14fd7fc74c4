"""Registry of functions and versions, their rollouts, and the checkpoints that they use."""
