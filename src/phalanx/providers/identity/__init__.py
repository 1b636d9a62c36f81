"""Providers of identities: where people sign in."""
