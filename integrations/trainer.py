"""PipelineTrainer: transformers' Trainer, whose forwards, backwards and updates run through a pipeline.

    Trainer's loop                          here
    get_batch_samples   k batches           kept
    training_step       once a batch        the last one of a step hands all k to pipe.train_step
    clip, optimizer     over the model      what the pipeline has done already; parameters have no gradient any more
    lr_scheduler        over that           runs as ever; its rates are copied to the pipeline's optimizers
    prediction_step     model(**inputs)     pipe.eval_step; the output goes from the last stage to all processes

Each process runs the whole loop as if it were alone, so that all make the same decisions over the same batches; only
the first one logs and writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments

from ..pipe import PipelineModule, named

_FOLDER = "pipeline"  # of a checkpoint, beside what Trainer writes
_REFUSED = {  # arguments of TrainingArguments, and what to type instead
    "deepspeed": "no such argument, as the pipeline shares out the model",
    "fsdp": 'pipeline={"mesh": {"pipe": ...}}',
    "parallelism_config": 'pipeline={"mesh": {"pipe": ..., "tensor": ...}}',
    "activation_checkpointing": 'pipeline={"recompute": "layer"}',
    "torch_compile": 'pipeline={"precision": stagewright.Precision(compile=True)}',
    "fp16": "bf16=True",
    "fp16_full_eval": "bf16=True",
    "bf16_full_eval": "bf16=True",
    "label_smoothing_factor": "a model whose own loss smooths labels",
    "neftune_noise_alpha": "a model that adds that noise itself",
    "auto_find_batch_size": "a per_device_train_batch_size that fits",
}


class PipelineTrainer(Trainer):
    """A Trainer of a model that is cut into stages; started by torchrun, a process a rank of the mesh.

    One step is a batch of gradient_accumulation_steps microbatches of per_device_train_batch_size samples each,
    the same in all processes. Logged losses, norms, rates and metrics are those of the whole batch, and equal those
    of a Trainer in one process to rounding. `save_model` and checkpoints have the whole model in transformers' format
    (and the pipeline's own state beside it): call them in all processes. In `trainer.model` only the stages of this
    process are trained; `trainer.pipe.full_state_dict()` has all of them.

    Arguments:
        args, kwargs: of Trainer.
        pipeline: arguments of PipelineModule, such as {"schedule": "zb-h1", "mesh": {"pipe": 4}}; those that
            TrainingArguments have (optimizer, max_grad_norm, bf16, seed) are taken from there.

    Raises ValueError for arguments that a pipeline cannot follow, with what to type instead.
    """

    pipe: PipelineModule | None = None
    _trained: nn.Module | None = None  # the model that it trains

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._pipeline = dict(pipeline or {})
        self._batches: Sequence[Mapping[str, Any]] = ()  # of the step under way
        self._resumed: Path | None = None  # a checkpoint that the pipeline loads as soon as it is built
        self._norm: float | None = None
        given = next((each for each in [*args, *kwargs.values()] if isinstance(each, TrainingArguments)), None)
        if given is not None:
            _be_alone(given)
        super().__init__(*args, **kwargs)
        _be_alone(self.args)
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func={self.compute_loss_func!r:.60}: expected a model that returns its loss"
            )

    # What is put together

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the pipeline has its own

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Each process moves its own stages."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's, over the whole model, which only carries rates; those of the stages are made like it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.pipe is None or self._trained is not self.model:
            if self.pipe is not None:
                self.pipe.close()
            self._trained = self.model
            options: dict[str, Any] = {
                "num_microbatches": self.args.gradient_accumulation_steps,
                "max_grad_norm": self.args.max_grad_norm or math.inf,  # Trainer logs the norm in any case
                "precision": "bf16" if self.args.bf16 else None,
                "seed": self.args.seed,
                "device": self.args.device,
                "loss_fn": "model",
            }
            factory = named(partial(_like, optimizer, self.model))
            self.pipe = PipelineModule(self.model, optimizer=factory, **options | self._pipeline)
            if (count := self.pipe._building.replica[1]) > 1:
                raise ValueError(
                    f"{count} data replicas: expected a mesh of pipe and tensor alone, since Trainer's batches are "
                    f"those of one pipeline"
                )
        return optimizer

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The same batches in all processes, those that workers draw included."""
        state = self.args.distributed_state
        before, state.process_index = state.process_index, 0
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            state.process_index = before

    # Training

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        self._batches, num_items = super().get_batch_samples(*args, **kwargs)
        return list(self._batches), num_items

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches = [self._prepare_inputs(batch) for batch in self._batches]
        batch = _joined(batches) or {"microbatches": _divided(batches, self._num_microbatches)}
        pipe = self._built(batch)
        for optimizer in pipe.optimizers:
            for group, rates in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
                group.update({name: value for name, value in rates.items() if name != "params"})
        result = pipe.train_step(**batch)
        if result.loss is None:
            raise ValueError(f"{pipe.schedule!r} tells the loss of a batch later: expected a schedule with a flush")
        self._norm = result.grad_norm
        return torch.tensor(result.loss, device=self.args.device)

    @property
    def _num_microbatches(self) -> int:
        assert self.pipe is not None
        return self.pipe.schedule.num_microbatches

    def _built(self, batch: Mapping[str, Any]) -> PipelineModule:
        """The pipeline; the first batch builds it, which a checkpoint needs."""
        if self.pipe is None:
            self.create_optimizer()
        assert self.pipe is not None
        self.pipe.build(**batch)
        if self._resumed is not None:
            self.pipe.load(self._resumed)
            self._resumed = None
        return self.pipe

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._norm

    # Evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        through = partial(self._evaluated, loss_only=prediction_loss_only)
        loss, logits, labels = super().prediction_step(through, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        return loss, logits, labels

    def _evaluated(self, *, loss_only: bool, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """The result of `model(**inputs)`, in all processes."""
        pipe = self._built(inputs)
        has_loss = any(inputs.get(name) is not None for name in self.label_names)
        if not has_loss:
            return _shared(pipe.predict(**inputs), self.args.device)
        result = pipe.eval_step(**inputs)
        loss = torch.tensor(result.loss, device=self.args.device)
        if loss_only:
            return {"loss": loss}
        return _shared(result.output, self.args.device)

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.pipe is not None and self.pipe._building.pipeline is not None:
            state_dict = self.pipe.full_state_dict()
        super()._save(output_dir, state_dict)
        _wait()  # all processes look for what the first one has written

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.pipe is not None
        self.pipe.save(Path(output_dir) / _FOLDER)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all processes draw the same batches
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint) / _FOLDER
        if not folder.is_dir():
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} has no folder {_FOLDER!r}: expected a checkpoint "
                f"of a PipelineTrainer, saved without save_only_model; from_pretrained(...) reads weights alone"
            )
        self._resumed = folder

    def _load_best_model(self) -> None:
        assert self.pipe is not None
        assert self.state.best_model_checkpoint is not None
        self.pipe.load_state_dict(type(self.model).from_pretrained(self.state.best_model_checkpoint).state_dict())


def _be_alone(args: TrainingArguments) -> None:
    """Refuse what a pipeline cannot follow, and have Trainer and accelerate share out nothing among processes."""
    for name, instead in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={value!r}) with a pipeline: expected {instead}")
    if args.device.type and args.distributed_state is not None:
        args.distributed_state.distributed_type = DistributedType.NO
        args.distributed_state.num_processes = 1


def _like(
    optimizer: torch.optim.Optimizer, model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and groups over a stage's parameters."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {name: group_of.get(id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    groups = [
        {**group, "params": [p for name, p in parameters if names[name] == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    plain: Any = type(getattr(optimizer, "optimizer", optimizer))  # below accelerate's
    made: torch.optim.Optimizer = plain(groups)
    return made


def _rows(batch: Mapping[str, Any]) -> int:
    return next((len(x) for x in batch.values() if isinstance(x, torch.Tensor) and x.dim()), 0)


def _joined(batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """One batch of all rows; None where they differ in more than their number, as padded ones do."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    shapes = [{name: getattr(x, "shape", (0,))[1:] for name, x in batch.items()} for batch in batches]
    are_rows = all(isinstance(x, torch.Tensor) and len(x) == _rows(b) for b in batches for x in b.values())
    if not are_rows or any(shape != shapes[0] for shape in shapes):
        return None
    return {name: torch.cat([batch[name] for batch in batches]) for name in first}


def _divided(batches: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The same rows in the same order in `count` microbatches: an epoch's last step has fewer batches."""
    pieces = list(batches)
    while len(pieces) < count:
        longest = max(range(len(pieces)), key=lambda number: _rows(pieces[number]))
        num_rows, piece = _rows(pieces[longest]), pieces[longest]
        if num_rows < 2:
            raise ValueError(
                f"a step of {len(pieces)} samples cannot be cut into {count} microbatches: expected "
                f"dataloader_drop_last=True, or fewer gradient_accumulation_steps"
            )
        rows = [slice(None, num_rows // 2), slice(num_rows // 2, None)]
        pieces[longest : longest + 1] = [
            {
                n: x[part] if isinstance(x, torch.Tensor) and x.dim() and len(x) == num_rows else x
                for n, x in piece.items()
            }
            for part in rows
        ]
    if len(pieces) > count:
        raise ValueError(
            f"{len(pieces)} batches of several shapes make no {count} microbatches: expected num_microbatches="
            f"{len(pieces)}, as gradient_accumulation_steps says"
        )
    return pieces


def _shared(output: object, device: torch.device) -> Any:
    """A value that one process has, in all of them."""
    if not dist.is_initialized():
        return output
    has: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(has, output is not None)
    box = [output]
    dist.broadcast_object_list(box, src=has.index(True), device=device if device.type == "cuda" else None)
    return box[0]


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
