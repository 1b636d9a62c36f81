"""Durable truth: records and events behind numbered migrations, blobs and logs."""
