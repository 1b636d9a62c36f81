"""What use costs and how it is judged: prices, budgets, hours, electricity, waste."""
