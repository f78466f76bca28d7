"""Pipeline-parallel training of PyTorch models: one schedule, checked, simulated, executed and drawn.

`import stagewright` is cheap: modules that need torch load on first use, so that planning and drawing start at once.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cli, comm, experiments, integrations, partition, pipe, schedules, viz  # noqa: F401
    from .comm import PeerLost, PipelineError, PipelineTimeout
    from .partition.model.model_units import RecordingError
    from .pipe import *  # noqa: F403
    from .schedules import ScheduleError

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
    "PeerLost",
    "PipelineError",
    "PipelineModule",
    "PipelineTimeout",
    "Precision",
    "RecordingError",
    "SaveResult",
    "ScheduleError",
    "Slices",
    "StepRecord",
    "StepResult",
    "Synchronous",
    "Verification",
    "VerificationError",
    "Weights",
    "__version__",
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

__version__ = "0.1.0"
# Types that a notebook shows as a page, if they are the last line of a cell.
_SHOWN = (("schedules.ir", "Schedule"), ("schedules.timing.timeline", "Timeline"), ("partition.plans.plan", "Plan"))
# Where a name is that is not in `pipe`.
_FILES = {
    "PeerLost": "comm",
    "PipelineError": "comm",
    "PipelineTimeout": "comm",
    "RecordingError": "partition.model.model_units",
    "ScheduleError": "schedules",
}
_FOLDERS = ("cli", "comm", "experiments", "integrations", "partition", "pipe", "schedules", "viz")


if not TYPE_CHECKING:  # else a misspelt name would be of any type

    def __getattr__(name: str) -> Any:
        # Only here, never at the top: an import that runs with this file would load torch, and would break
        # pytest, which imports the file under a name of its own because the repository root is the package.
        if name in _FOLDERS:
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            return getattr(import_module(f"{__name__}.{_FILES.get(name, 'pipe')}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_FOLDERS])


def _as_html(shown: Any) -> str:
    from .viz.notebook import as_html  # loads only when something is shown

    return as_html(shown)


def _show_in_notebooks() -> None:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        for module, name in _SHOWN:
            shell.display_formatter.formatters["text/html"].for_type_by_name(f"{__name__}.{module}", name, _as_html)


_show_in_notebooks()
