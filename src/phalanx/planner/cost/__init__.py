"""Cost of training a model: work, memory, traffic and time. Formulas with their sources, over records of facts."""
