"""Many jobs on many kinds of devices, and one job on devices whose price changes: simulated."""
