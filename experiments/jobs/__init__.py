"""Experiments: what is asked, the jobs that answer it, how each one stands, and the report."""
