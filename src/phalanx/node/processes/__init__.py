"""Processes: starting, containing, finding and ending them."""
