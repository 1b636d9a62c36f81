"""How a model is split over the ranks of a job."""
