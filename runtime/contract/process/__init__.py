"""Conventions of every process: logs, redaction, environment variables, task groups.

It lies in the contract because every room follows it and rooms may import nothing else of each other.
"""
