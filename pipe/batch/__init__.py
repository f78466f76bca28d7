"""A batch on its way in, and what comes out: microbatches, losses, results."""
