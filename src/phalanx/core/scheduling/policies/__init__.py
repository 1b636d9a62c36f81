"""The policies by name: who goes first, who may be stopped. All decide on a `Board`; none knows a clock."""
