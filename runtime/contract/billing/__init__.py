"""Ledger rows and prices."""
