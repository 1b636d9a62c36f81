"""Commands that measure, draw and load the network's topology."""
