"""Reads handler source by its syntax tree; nothing is run or imported."""
