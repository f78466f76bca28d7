"""What a run reports of itself: memory, traces, figures."""
