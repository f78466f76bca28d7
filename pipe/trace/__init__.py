"""Measurements: a record per rank, timelines and costs of all ranks."""
