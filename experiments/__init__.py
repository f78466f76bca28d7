"""Experiments that anyone can run again: what they run, on which nodes, and their results."""
