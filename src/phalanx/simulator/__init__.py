"""Traces replayed in virtual time through the policies that run live, and what comes out of it."""
