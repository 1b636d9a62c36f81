"""Spans, the goodput ledger and usage summaries."""
