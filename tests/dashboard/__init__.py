"""A head with planted state for the dashboard: ten questions that its pages answer, and pictures of its pages."""
