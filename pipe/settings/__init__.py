"""The user's input, read and checked: options, the form of batches, losses, precision, recomputation."""
