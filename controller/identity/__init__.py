"""Identities on links between machines: the certificate authority of this system, and the nodes that it vouches for."""
