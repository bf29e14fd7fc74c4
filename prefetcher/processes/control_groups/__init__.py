"""Control groups of workers: limits, set-up on a machine, and removal with all that is left in them."""
