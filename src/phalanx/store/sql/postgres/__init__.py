"""PostgreSQL through psycopg 3, which is imported in this folder alone: one connection commits, a few read, a fence lets one head write."""
