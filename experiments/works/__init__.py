"""Work of the catalog's experiments: `work(case, repetitions) -> figures`, and `findings(figures) -> sentences`."""
