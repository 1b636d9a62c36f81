"""Jobs, roles, queues and allocations: requests and grants."""
