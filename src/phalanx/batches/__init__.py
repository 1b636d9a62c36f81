"""Batch inference: files of requests, the job that answers them, and its program."""
