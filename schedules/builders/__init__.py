"""The families of schedules: a file each, a pure function that says who computes what in which order."""
