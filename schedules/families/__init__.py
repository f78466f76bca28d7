"""The families of schedules: pure functions that return the order of a named schedule, one idea per file."""
