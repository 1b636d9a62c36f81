"""Failure rules, restart budgets and the checkpoint interval."""
