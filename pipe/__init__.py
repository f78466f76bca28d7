"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from .batches import NonFiniteLossError
from .module import PipelineModule
from .results import EvalResult, StepResult

__all__ = ["EvalResult", "NonFiniteLossError", "PipelineModule", "StepResult"]
