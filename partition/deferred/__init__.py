"""Models that are built without memory for their weights, which each process makes for its own stages alone."""
