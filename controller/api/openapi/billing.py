"""Money: the ledger, its sums, prices and budgets."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetstart.runtime.contract.billing.prices import PriceSheet

from ...schemas.functions import BudgetInfo, BudgetTerms, Invoice, LedgerLine, NewPrices, Usage
from .operation import in_path, in_query, listed, operation, ref

STRUCTS: tuple[type[msgspec.Struct], ...] = (
    BudgetInfo,
    BudgetTerms,
    Invoice,
    LedgerLine,
    NewPrices,
    PriceSheet,
    Usage,
)


def paths() -> dict[str, Any]:
    function, budgeted = in_query("function"), in_path("function")
    span = [in_query(name, "integer") for name in ("since_unix_ms", "until_unix_ms")]
    return {
        "/api/v1/usage": {"get": operation("Sums of the ledger", ref(Usage), function, in_query("by"), *span)},
        "/api/v1/invoices/{month}": {
            "get": operation(
                "All rows of a month, by what determines their price", ref(Invoice), in_path("month"), function
            )
        },
        "/api/v1/ledger": {
            "get": operation(
                "The rows, a line of JSON each", ref(LedgerLine), function, *span, media="application/x-ndjson"
            )
        },
        "/api/v1/prices": {
            "get": operation("All price sheets, the first one first", listed(PriceSheet)),
            "post": operation(
                "Rates from a moment that is still to come", ref(PriceSheet), status="201", body=ref(NewPrices)
            ),
        },
        "/api/v1/budgets": {"get": operation("All budgets", listed(BudgetInfo))},
        "/api/v1/budgets/{function}": {
            "put": operation("What a function may cost", ref(BudgetInfo), budgeted, body=ref(BudgetTerms)),
            "delete": operation("Take the budget away", ref(BudgetInfo), budgeted),
        },
    }
