"""Billing: the ledger's writer and archive, usage and invoices, prices, budgets.

The rows are defined in `runtime.contract.billing.ledger`; gateways and nodes write them.
"""
