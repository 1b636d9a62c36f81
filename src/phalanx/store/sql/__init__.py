"""SQL stores: what the two databases share. Each lives in a folder of its own, with its SQL by name: `sqlite` and `postgres`."""
