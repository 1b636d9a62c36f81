"""Small protocols that the controller speaks to: Engine, Store, Blobs, Logs, Clock."""
