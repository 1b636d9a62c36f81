"""Verbs about who may do what: users, projects, queues, tokens."""
