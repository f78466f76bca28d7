"""What the user gives, read and checked: options, the form of batches, losses, precision, recomputation."""
