"""What keeps services at their replicas: rollouts, and numbers that follow the load."""
