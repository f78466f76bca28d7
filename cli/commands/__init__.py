"""The commands that need no model: a file each."""
