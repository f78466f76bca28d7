"""Shared by the tests: small models, the one-process reference, and a pool of gloo workers."""
