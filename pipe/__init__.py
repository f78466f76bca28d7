"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from ..partition.deferred.recording import deferred
from ..partition.model.linear_loss import LinearCrossEntropy, linear_cross_entropy
from ..partition.profiler.optimizers import named
from .batch.batches import NonFiniteLossError
from .checkpoint.persist import SaveResult
from .checkpoint.plain import export_checkpoint, import_checkpoint, read_checkpoint
from .edits import Edits, edit
from .module import PipelineModule
from .results import EvalResult, StepRecord, StepResult
from .settings.arguments import Asynchronous, Auto, Inputs, Mesh, Precision, Slices, Synchronous, Weights
from .settings.delay_correction import ErrorFeedback
from .settings.model_loss import ModelLoss
from .stage.attending import attend
from .stage.tokens import first_position, positions
from .verify import Verification, VerificationError

__all__ = [
    "Asynchronous",
    "Auto",
    "Edits",
    "ErrorFeedback",
    "EvalResult",
    "Inputs",
    "LinearCrossEntropy",
    "Mesh",
    "ModelLoss",
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
    "attend",
    "deferred",
    "edit",
    "export_checkpoint",
    "first_position",
    "import_checkpoint",
    "linear_cross_entropy",
    "named",
    "positions",
    "read_checkpoint",
]
