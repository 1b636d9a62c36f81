"""What is asked and what is granted: jobs, roles, queues, allocations."""
