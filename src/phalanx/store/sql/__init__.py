"""SQL stores: the code that both databases share. `sqlite` and `postgres` contain the code and the named SQL statements of each."""
