"""Web programs of jobs: their pages reach a browser through the head, on an origin that is not the dashboard's."""
