"""Other people's training loops over a pipeline: `pip install "stagewright[integrations]"`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import trainer
    except ImportError as error:
        raise ImportError(f'{error}: expected pip install "stagewright[integrations]"') from error
    return getattr(trainer, name)
