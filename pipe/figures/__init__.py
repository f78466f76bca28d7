"""Reports of a run on itself: memory, traces, figures."""
