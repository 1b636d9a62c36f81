"""What the controller counts: use, energy, hours, budgets."""
