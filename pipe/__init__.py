"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from ..partition.deferred.recording import deferred
from ..partition.profiler.optimizers import named
from .arguments import Asynchronous, Auto, Inputs, Mesh, Precision, Slices, Synchronous, Weights
from .batch.batches import NonFiniteLossError
from .batch.results import EvalResult, StepRecord, StepResult
from .checkpoint.persist import SaveResult
from .checkpoint.plain import export_checkpoint, import_checkpoint, read_checkpoint
from .edits import Edits, edit
from .module import PipelineModule
from .stage.slices import first_position
from .update.delay_correction import ErrorFeedback
from .verify import Verification, VerificationError

__all__ = [
    "Asynchronous",
    "Auto",
    "Edits",
    "ErrorFeedback",
    "EvalResult",
    "Inputs",
    "Mesh",
    "NonFiniteLossError",
    "PipelineModule",
    "Precision",
    "SaveResult",
    "Slices",
    "StepRecord",
    "StepResult",
    "Synchronous",
    "Verification",
    "VerificationError",
    "Weights",
    "deferred",
    "edit",
    "export_checkpoint",
    "first_position",
    "import_checkpoint",
    "named",
    "read_checkpoint",
]
