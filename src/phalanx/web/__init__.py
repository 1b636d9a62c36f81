"""Pages the head serves to a browser."""
