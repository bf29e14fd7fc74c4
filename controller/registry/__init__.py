"""Functions, versions, rollouts, checkpoints in use."""
