"""What the scheduler estimates of jobs: how long they run, how fast on which devices, and what a move costs them."""
