"""Open connections: event streams, logs, exec sessions."""
