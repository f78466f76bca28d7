"""PipelineStrategy: Lightning's Trainer around a LightningModule that trains through a pipeline.

    class Model(LightningModule):
        automatic_optimization = False  # the pipeline runs backwards and optimizers

        def __init__(self, pipe):
            super().__init__()
            self.pipe = pipe  # a PipelineModule with optimizer=

        def training_step(self, batch, batch_idx):
            self.log("loss", self.pipe.train_step(**batch).loss)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.pipe.eval_step(**batch).loss)

        def configure_optimizers(self):  # Trainer wants it
            return None

    Trainer(strategy=PipelineStrategy(), ...).fit(Model(pipe), pipe.loader(dataset, batch_size=...), ...)

Each process runs the whole loop as if it were alone, so that all make the same decisions; only the first writes files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from ..pipe import PipelineModule

_FOLDER = ".pipeline"  # of the pipeline's own state, after the name of a checkpoint's file


class PipelineStrategy(SingleDeviceStrategy):
    """Strategy for a LightningModule whose attribute `pipe` is a PipelineModule; start it with torchrun.

    Loaders are used unchanged: `pipe.loader` gives each process its batches. A checkpoint has the weights of the whole
    model under `state_dict`; a folder next to it is what `fit(ckpt_path=...)` resumes from, under any cut.

    Raises ValueError for a module and for arguments of Trainer that a pipeline cannot follow.
    """

    def setup(self, trainer: Trainer) -> None:
        pipe = self._pipe
        refused = {
            "gradient_clip_val": "PipelineModule(max_grad_norm=...)",
            "accumulate_grad_batches": "PipelineModule(num_microbatches=...)",
        }
        for name, instead in refused.items():
            if (value := getattr(trainer, name)) not in (None, 1):
                raise ValueError(f"Trainer({name}={value!r}) with a pipeline: expected {instead}")
        if trainer.precision != "32-true":
            raise ValueError(
                f"Trainer(precision={trainer.precision!r}) with a pipeline: expected PipelineModule(precision=...)"
            )
        self.global_rank = pipe.world.rank
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        if trainer.lightning_module.configure_optimizers() is not None:
            raise ValueError(
                "configure_optimizers with a pipeline: expected None, and PipelineModule(optimizer=, lr_scheduler=)"
            )
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def _pipe(self) -> PipelineModule:
        module = self.lightning_module
        assert module is not None
        pipe = getattr(module, "pipe", None)
        if not isinstance(pipe, PipelineModule) or module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} with PipelineStrategy: expected self.pipe = stagewright.PipelineModule(...), "
                f"and automatic_optimization = False"
            )
        if any(True for _ in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has parameters of its own, which the pipeline would not train: expected the "
                f"model in self.pipe alone, and not in an attribute"
            )
        return pipe

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self._pipe.num_steps
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        assert module is not None
        progress = module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for _ in range(self._pipe.num_steps - before):  # what Trainer.global_step counts
            progress.increment_ready()
            progress.increment_completed()
        return output

    # Among processes, which all have the same numbers

    @property
    def is_global_zero(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src)
        return held[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = [decision]
        if dist.is_initialized():
            votes = [decision] * dist.get_world_size()
            dist.all_gather_object(votes, decision)
        return False not in votes if all else True in votes

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._pipe.full_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._pipe.save(f"{filepath}{_FOLDER}")

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{_FOLDER}", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(f"{checkpoint_path}{_FOLDER}")
        if not folder.is_dir():
            raise ValueError(
                f"{str(checkpoint_path)!r} has no folder {folder.name!r}: expected a pipeline's checkpoint"
            )
        self._pipe.load(folder)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has loaded the pipeline."""
