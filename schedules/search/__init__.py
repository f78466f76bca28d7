"""Synthesis: the order of a batch's work that ends soonest for given costs and memory, and its distance from a lower
bound.
"""
