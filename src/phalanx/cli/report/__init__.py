"""`phalanx report`: what the GPUs of the fleet were used for."""
