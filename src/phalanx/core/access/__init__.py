"""Roles, routes and what each may do."""
