"""Time: costs, the event-driven simulator, timelines, lower bounds, and the causes of idle time."""
