"""Data and tensor parallel groups around each stage: who holds which part of a tensor, and which module is cut how."""

from .attention import Experts, Heads
from .style import Style, StyleError
from .styles import Column, Local, Row, Samples, Sequence, SummedGradients
from .tensor_option import TensorStyles, read_tensor_parallel

__all__ = [
    "Column",
    "Experts",
    "Heads",
    "Local",
    "Row",
    "Samples",
    "Sequence",
    "Style",
    "StyleError",
    "SummedGradients",
    "TensorStyles",
    "read_tensor_parallel",
]
