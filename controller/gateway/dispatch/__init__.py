"""Dispatch: a call's slot on a worker, its attempts, its response and its record."""
