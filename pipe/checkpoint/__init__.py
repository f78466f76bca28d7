"""Checkpoints: a snapshot of what this process holds, brought to the disk by all processes together, and read again."""
