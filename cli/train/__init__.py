"""`stagewright train`: the example GPT, its corpus, the loop of one rank, and what a run leaves behind."""
