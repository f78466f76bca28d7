"""`stagewright train`: the example GPT, its corpus, the loop of one rank, and the files of a run."""
