"""Experiments: declarations, their jobs with their states, and reports."""
