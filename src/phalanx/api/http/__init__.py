"""HTTP itself: listeners, middleware, routing, bodies, errors and the OpenAPI document."""
