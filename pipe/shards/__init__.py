"""Data and tensor parallel groups around each stage: who holds which part of a tensor, and which module is cut how."""

from .attention import Experts as Experts
from .attention import Heads as Heads
from .style import Style as Style
from .style import StyleError as StyleError
from .styles import Column as Column
from .styles import Local as Local
from .styles import Row as Row
from .styles import Samples as Samples
from .styles import Sequence as Sequence
from .styles import SummedGradients as SummedGradients
from .tensor_option import TensorStyles as TensorStyles
from .tensor_option import read_tensor_parallel as read_tensor_parallel
