"""Routes of users, sign-in, secrets and the audit trail."""
