"""Spans, the goodput ledger and receipts."""
