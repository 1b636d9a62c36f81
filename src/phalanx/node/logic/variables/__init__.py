"""The variables that processes of a job get."""
