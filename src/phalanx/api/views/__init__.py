"""Records as the API shows them."""
