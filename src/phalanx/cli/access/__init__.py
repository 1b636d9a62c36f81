"""Commands for users, projects, queues, tokens and the audit trail."""
