"""MIG on this node: reads what a GPU can be divided into, makes and removes slices while others run, and knows its own. Never switches MIG mode."""
