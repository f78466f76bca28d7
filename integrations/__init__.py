"""Training loops of other libraries over a pipeline: `pip install "stagewright[integrations,lightning]"`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator import PipelineAccelerator
    from .lightning import PipelineStrategy
    from .trainer import PipelineTrainer

__all__ = ["PipelineAccelerator", "PipelineStrategy", "PipelineTrainer"]
_FILES = {"PipelineAccelerator": "accelerator", "PipelineStrategy": "lightning", "PipelineTrainer": "trainer"}


if not TYPE_CHECKING:  # else a misspelt name would be of any type

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(f".{_FILES[name]}", __name__)
        except ImportError as error:
            raise ImportError(f'{error}: expected pip install "stagewright[integrations,lightning]"') from error
        return getattr(module, name)
