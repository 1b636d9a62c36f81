"""Pure decisions and records: no clock, disk, network, log or randomness."""
