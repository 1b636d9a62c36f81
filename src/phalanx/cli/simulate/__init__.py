"""`phalanx simulate`: a trace replayed in virtual time, as figures, a plot or a page."""
