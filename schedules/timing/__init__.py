"""Time: costs, the event-driven simulator, timelines, lower bounds, and why a rank was idle."""
