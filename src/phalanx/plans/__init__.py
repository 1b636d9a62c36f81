"""Plans in the words of the command line: from options to an answer, for `phalanx plan`, for the API and for the dashboard."""
