"""Egress proxy and ingress forwarding of workers."""
