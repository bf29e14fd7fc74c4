"""Calibration of the planner by what starts and answers really took."""
