"""From gradients to the next weights: sums over ranks, the global norm, versions, optimizer steps."""
