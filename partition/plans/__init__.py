"""Plans: which nodes make a stage, on which ranks, what that is predicted to take; as JSON, as text, as a schedule."""
