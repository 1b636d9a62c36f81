"""Protocols that the controller and the head depend on: Engine, Store, Blobs, Logs, Clock, Election."""
