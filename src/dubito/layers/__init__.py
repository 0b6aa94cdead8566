"""What touches a network's layers: where rows lie, factors on nodes, and taps on what layers see."""
