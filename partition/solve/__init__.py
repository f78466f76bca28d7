"""`partition()`: which cuts, how many replicas, on which ranks; exact, by dynamic programming."""
