"""What people and their tools see of a running system: metrics, traces, the context of log lines, the dashboard.

Nothing here decides anything, and calls do not wait for any of it: it reads what the gateway's one timeline, the view
and the ledger say.
"""
