"""The supervisor beside the ranks on each node; knows no server code."""
