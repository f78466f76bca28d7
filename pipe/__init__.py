"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from ..partition.profiler.optimizers import named
from .batch.batches import NonFiniteLossError
from .batch.results import EvalResult, StepResult
from .measure.steps import StepRecord
from .module import PipelineModule
from .verify import Verification, VerificationError

__all__ = [
    "EvalResult",
    "NonFiniteLossError",
    "PipelineModule",
    "StepRecord",
    "StepResult",
    "Verification",
    "VerificationError",
    "named",
]
