"""A module as a graph that can be cut: the half of the partitioner that needs torch."""
