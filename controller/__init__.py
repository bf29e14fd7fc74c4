"""The control plane: gateway, management API, scheduling, state, ledger, and the `fs` command line."""

__all__: list[str] = []
