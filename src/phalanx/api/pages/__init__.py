"""The dashboard's pages for browsers: sign-in, pages, and the files that they load."""
