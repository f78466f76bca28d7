"""Where a model is cut into stages."""
