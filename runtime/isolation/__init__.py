"""Namespaces, mounts, seccomp."""
