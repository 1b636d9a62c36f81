"""Services that messages are sent to."""
