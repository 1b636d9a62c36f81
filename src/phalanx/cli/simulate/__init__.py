"""`phalanx simulate`, `whatif` and `drill`: replay traces and test the control plane in virtual time."""
