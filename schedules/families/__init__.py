"""The families of schedules: pure functions that say who computes what in which order, those of one idea in a file."""
