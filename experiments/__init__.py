"""The training command, its model and its corpus."""
