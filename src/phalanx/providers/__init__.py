"""Providers of node pools: they start and stop nodes when the scheduler wants them."""
