"""Data and tensor parallel groups around each stage: who holds which part of a tensor."""
