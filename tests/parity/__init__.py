"""The same answer from two ways of computing it."""
