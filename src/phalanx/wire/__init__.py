"""Messages between processes and over the network, versioned; each release accepts the messages of the one before."""
