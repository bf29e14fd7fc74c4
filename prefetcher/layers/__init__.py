"""Layers on the node: installed packages of functions, fetched from the store and kept on the node's disk."""
