"""The runtime: PipelineModule, stages, and the engine that executes a schedule."""

from ..partition.deferred.recording import deferred as deferred
from ..partition.model.linear_loss import LinearCrossEntropy as LinearCrossEntropy
from ..partition.model.linear_loss import linear_cross_entropy as linear_cross_entropy
from ..partition.profiler.optimizers import named as named
from .batch.batches import NonFiniteLossError as NonFiniteLossError
from .checkpoint.persist import SaveResult as SaveResult
from .checkpoint.plain import export_checkpoint as export_checkpoint
from .checkpoint.plain import import_checkpoint as import_checkpoint
from .checkpoint.plain import read_checkpoint as read_checkpoint
from .edits import Edits as Edits
from .edits import edit as edit
from .module import PipelineModule as PipelineModule
from .results import EvalResult as EvalResult
from .results import StepRecord as StepRecord
from .results import StepResult as StepResult
from .settings.arguments import Asynchronous as Asynchronous
from .settings.arguments import Auto as Auto
from .settings.arguments import Inputs as Inputs
from .settings.arguments import Mesh as Mesh
from .settings.arguments import Precision as Precision
from .settings.arguments import Slices as Slices
from .settings.arguments import Synchronous as Synchronous
from .settings.arguments import Weights as Weights
from .settings.delay_correction import ErrorFeedback as ErrorFeedback
from .settings.model_loss import ModelLoss as ModelLoss
from .stage.attending import attend as attend
from .stage.tokens import first_position as first_position
from .stage.tokens import positions as positions
from .verify import Verification as Verification
from .verify import VerificationError as VerificationError

__all__ = [
    "Asynchronous", "Auto", "Edits", "ErrorFeedback", "EvalResult", "Inputs", "LinearCrossEntropy", "Mesh",
    "ModelLoss", "NonFiniteLossError", "PipelineModule", "Precision", "SaveResult", "Slices", "StepRecord",
    "StepResult", "Synchronous", "Verification", "VerificationError", "Weights", "attend", "deferred", "edit",
    "export_checkpoint", "first_position", "import_checkpoint", "linear_cross_entropy", "named", "positions",
    "read_checkpoint",
]  # fmt: skip  # written out: the reference reads it without running it
