"""Models, the two sides that run them, and clocks: for the bench and for experiments whose ranks really run."""
