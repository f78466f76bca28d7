"""The commands that run experiments: a file each."""
