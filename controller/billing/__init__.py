"""Money: the ledger's segments and their compaction, prices, sums and invoices, budgets.

The rows themselves are `runtime.contract.ledger`; gateways (`controller.ledger`) and nodes write them.
"""
