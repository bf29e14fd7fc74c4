"""Admission control: which calls are rejected before their body is read, and with what error."""
