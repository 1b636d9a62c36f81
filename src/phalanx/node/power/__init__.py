"""Power limits of this node's GPUs, set by an operator's command and restored after it."""
