"""Leader lease, reconcile loop, worker pools, autoscaling, calibration of the planner."""
