"""Does it learn without a flush? The experiment `convergence` trains a GPT under many settings."""
