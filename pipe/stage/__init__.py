"""From a model to stages, and one stage on its rank."""
