"""Packages that a function needs: found beside its handler, resolved, built into a layer and published."""
