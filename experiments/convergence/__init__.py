"""Does it learn without a flush? `stagewright experiment convergence` trains a GPT by several methods."""
