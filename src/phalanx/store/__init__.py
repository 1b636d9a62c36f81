"""Durable storage: records in databases with numbered migrations, blobs, and logs."""
