"""Volumes from the command line: a folder becomes a version, a version becomes a folder."""
