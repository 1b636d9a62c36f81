"""Services: their terms, revisions, replicas, and the load and use that gateways report."""
