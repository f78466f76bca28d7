"""Orders of F, I and W: the problem, what an order takes, and orders by lists. Families and searches stand above."""
