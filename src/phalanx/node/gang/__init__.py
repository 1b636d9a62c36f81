"""Processes of one job on several nodes: the authenticated connection between them, and tasks started at their request."""
