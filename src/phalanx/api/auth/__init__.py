"""Who may do what: authentication, authorization, redaction, and the audit of each call."""
