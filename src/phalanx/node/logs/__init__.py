"""Log files of the ranks and of the supervisor."""
