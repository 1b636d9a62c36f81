"""The connection to the head: its address, registration, and the channels on it."""
