"""The HTTP API of the head: authorizes and validates each request, passes it to the controller, and returns what was committed."""
