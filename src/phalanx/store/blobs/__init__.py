"""Storage of uploaded archives."""
