"""Orders of F, I and W: the problem, the times of an order, and list scheduling. Used by families and searches."""
