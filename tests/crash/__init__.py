"""Kill -9 of a real head under load at every place where it writes, and what must hold afterwards."""
