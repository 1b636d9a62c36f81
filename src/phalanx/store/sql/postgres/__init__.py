"""PostgreSQL through psycopg 3, imported only in this package: one connection commits, several read, and a fence admits one writing head."""
