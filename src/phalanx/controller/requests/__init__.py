"""Requests: check, apply, audit words and permission of each, by what they change."""
