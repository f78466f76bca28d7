"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from .batch.batches import NonFiniteLossError
from .batch.results import EvalResult, StepResult
from .module import PipelineModule

__all__ = ["EvalResult", "NonFiniteLossError", "PipelineModule", "StepResult"]
