"""What training a model costs: work, memory, traffic and time, as formulas with their sources over records of facts."""
