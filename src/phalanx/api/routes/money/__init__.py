"""Routes of use, energy and cost."""
