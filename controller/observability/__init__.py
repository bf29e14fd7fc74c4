"""Observability: metrics, traces, and the context of log lines.

Reads the calls' timelines, the view and the ledger. Decides nothing, and no call waits for it.
"""
