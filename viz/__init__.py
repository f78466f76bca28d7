"""Timelines as pictures and traces. Pure: no torch."""
