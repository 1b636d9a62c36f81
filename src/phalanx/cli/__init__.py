"""What a person types: arguments in, calls on the client, tables and next steps out."""
