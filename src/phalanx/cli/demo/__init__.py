"""`phalanx demo`: start a temporary cluster, train a real model, kill a node, and report the cost."""
