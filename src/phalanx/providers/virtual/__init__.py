"""The virtual provider: nodes with virtual devices, each a real supervisor on the head's machine."""
