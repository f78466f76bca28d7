"""Mesh(compress=): packed links, and packed sums of gradients, around a run that knows nothing of them."""
