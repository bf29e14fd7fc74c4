"""Launchers of workers: fork server and gVisor, with their warm-up."""
