"""Models, the two sides that run them, and clocks, for the bench and experiments on real ranks."""
