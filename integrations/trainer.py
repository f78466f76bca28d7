"""PipelineTrainer: transformers' Trainer, whose forwards, backwards and updates run through a pipeline.

    Trainer's loop                          here
    get_batch_samples   k batches           kept
    training_step       once a batch        the last one of a step hands all k to pipe.train_step
    clip, optimizer     over the model      what the pipeline has done already; parameters have no gradient any more
    lr_scheduler        over that           runs as ever; its rates are copied to the pipeline's optimizers
    prediction_step     model(**inputs)     pipe.eval_step; the output goes from the last stages to all processes

Each process runs the whole loop as if it were alone, so that all make the same decisions; only the first one logs and
writes. Data replicas read the batches that Trainer's processes would, and each evaluates some rows of every batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainingArguments

from ..pipe import PipelineModule, named

_FOLDER = "pipeline"  # of a checkpoint, beside what Trainer writes
# Arguments of TrainingArguments that are followed, or that change nothing here; others must be as they are by default.
_FOLLOWED = re.compile(
    "output_dir|max_.*|num_train_epochs|learning_rate|lr_.*|warmup_.*|optim|optim_args|weight_decay|adam_.*|bf16|tf32|"
    "use_cpu|use_cache|gradient_accumulation_steps|average_tokens.*|per_device_.*|logging_.*|log_.*|include_.*|"
    "disable_tqdm|report_to|run_name|project|trackio_.*|eval_.*|prediction_loss_only|batch_eval_metrics|save_.*|"
    "push_to_hub|hub_.*|load_best_model.*|metric_for_best.*|greater_is_better|ignore_data_skip|restore_callback_.*|"
    "full_determinism|seed|data_seed|accelerator_config|dataloader_.*|remove_unused_columns|label_names|"
    "train_sampling_.*|length_column_name|ddp_.*|fsdp_config|skip_memory_metrics|do_.*|resume_from_checkpoint|local_rank"
)
_REFUSED = {  # arguments of TrainingArguments, and what to type instead
    "deepspeed": "no such argument, as the pipeline shares out the model",
    "fsdp": 'pipeline={"mesh": {"pipe": ...}}',
    "parallelism_config": 'pipeline={"mesh": {"pipe": ..., "tensor": ...}}',
    "activation_checkpointing": 'pipeline={"recompute": "layer"}',
    "gradient_checkpointing": 'pipeline={"recompute": "layer"}',
    "torch_compile": 'pipeline={"precision": stagewright.Precision(compile=True)}',
    "fp16": "bf16=True",
    "fp16_full_eval": "bf16=True",
    "bf16_full_eval": "bf16=True",
    "label_smoothing_factor": "a model whose own loss smooths labels",
    "neftune_noise_alpha": "a model that adds that noise itself",
    "auto_find_batch_size": "a per_device_train_batch_size that fits",
}


_BYPASSED = ("compute_loss", "compute_loss_context_manager", "training_step")  # by a step through the pipeline


class PipelineTrainer(Trainer):
    """A Trainer of a model that is cut into stages; started by torchrun, a process a rank of the mesh.

    One step is a batch of gradient_accumulation_steps microbatches of per_device_train_batch_size samples each, in
    every data replica. Logged losses, norms, rates and metrics are those of the whole batch, and equal to rounding
    those of a Trainer over as many processes as there are replicas. `save_model` and checkpoints have the whole model
    in transformers' format (and the pipeline's own state beside it): call them in all processes. In `trainer.model`
    only the stages of this process are trained; `trainer.pipe.full_state_dict()` has all of them.

    Arguments:
        args, kwargs: of Trainer.
        pipeline: arguments of PipelineModule, such as {"schedule": "zb-h1", "mesh": {"pipe": 4}}; those that
            TrainingArguments have (optimizer, max_grad_norm, bf16, seed) are taken from there.

    Raises ValueError for arguments that a pipeline cannot follow, with what to type instead.
    """

    pipe: PipelineModule | None = None
    current_flos: float
    _trained: nn.Module | None = None  # the model that it trains

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._pipeline = dict(pipeline or {})
        self._batches: Sequence[Mapping[str, Any]] = ()  # of the step under way
        self._resumed: Path | None = None  # a checkpoint that the pipeline loads as soon as it is built
        self._norm: float | None = None
        for name in _BYPASSED:
            if getattr(type(self), name) is not getattr(PipelineTrainer, name):
                raise ValueError(
                    f"{type(self).__name__}.{name} would never be called, as the pipeline runs forwards and backwards: "
                    f"expected a model that returns the loss that you want"
                )
        given = next((each for each in [*args, *kwargs.values()] if isinstance(each, TrainingArguments)), None)
        if given is not None:
            _be_alone(given)
        super().__init__(*args, **kwargs)
        _be_alone(self.args)
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func={self.compute_loss_func!r:.60}: expected a model that returns its loss"
            )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: ValueError."""
        raise ValueError("hyperparameter_search with a pipeline: expected a run for each choice, of its own processes")

    # What is put together

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        kwargs["dataloader_config"].dispatch_batches = False  # each process reads what it needs
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the pipeline has its own

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Each process moves its own stages."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's, over the whole model, which only carries rates; those of the stages are made like it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        kind: Any = type(getattr(optimizer, "optimizer", optimizer))  # below accelerate's
        if not kind.__module__.startswith(("torch.optim.", "transformers.")):
            raise ValueError(
                f"an optimizer of {kind.__module__}.{kind.__name__}: expected one of torch.optim or transformers, as "
                f"each stage makes its own from the options of its groups"
            )
        if self.pipe is None or self._trained is not self.model:
            if self.pipe is not None:
                self.pipe.close()
            self._trained = self.model
            if (config := getattr(self.model, "config", None)) is not None:
                config.use_cache = self.args.use_cache  # as Trainer does, but for what model_init makes anew
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
            self.args.distributed_state.num_processes = self.pipe._building.replica[1]
            if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
                raise ValueError(f"{self.args.world_size} data replicas: expected average_tokens_across_devices=True")
            if self.args.world_size > 1 and not self.args.accelerator_config.even_batches:
                raise ValueError(
                    f"{self.args.world_size} data replicas: expected even_batches=True of accelerator_config"
                )
        return optimizer

    @property
    def _replica(self) -> tuple[int, int]:
        """Number of this process's data replica, and how many there are."""
        if self.pipe is None or self._trained is not self.model:
            self.create_optimizer()
        assert self.pipe is not None
        return self.pipe._building.replica

    @contextmanager
    def _seen_as(self, index: int, count: int) -> Iterator[None]:
        """Trainer and accelerate take this process for one of so many."""
        states = self.args.distributed_state, self.accelerator.state
        before = [(state.process_index, state.num_processes) for state in states]
        try:
            for state in states:
                state.process_index, state.num_processes = index, count
            yield
        finally:
            for state, (own, number) in zip(states, before, strict=True):
                state.process_index, state.num_processes = own, number

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> Any:
        """The same batches in all processes of a replica, those that workers draw included; to evaluate, in all."""
        with self._seen_as(*self._replica if is_training else (0, 1)):
            return super()._get_dataloader(dataset, description, batch_size, *args, is_training=is_training, **kwargs)

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
        self._check_weights(pipe, batches, num_items_in_batch)
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
        count = self._replica[1]
        assert self.pipe is not None
        layout = self.pipe._building.layout
        return self.args.gradient_accumulation_steps if layout is None else layout.schedule.num_microbatches // count

    def _check_weights(self, pipe: PipelineModule, batches: Sequence[Mapping[str, Any]], num_items: Any) -> None:
        """ValueError where Trainer weighs batches in another way than the pipeline, unless the user says how."""
        loss = pipe._settings.model_loss
        if loss is None or "example_inputs" in self._pipeline:
            return
        counts = [float(w) for w in loss.weigh([pipe._calls.batch((), batch).arguments for batch in batches])]
        if num_items is not None and sum(counts) != float(num_items):
            raise ValueError(
                f"Trainer divides the loss of {sum(counts):.0f} labels by {float(num_items):.0f}, as it counts labels "
                f"of a model with loss_type={getattr(self.model, 'loss_type', None)!r}: expected model.loss_type = "
                f'"ForCausalLM" before the trainer is made, if the model shifts labels'
            )
        of_all = counts[0] * len(counts) * self._replica[1]
        if num_items is None and (self._summed(sum(counts)) != of_all or len({*counts}) > 1):
            raise ValueError(
                f"Trainer gives the batches of a step equal weights, though their losses are means over {counts} "
                f'labels: expected pipeline={{"example_inputs": stagewright.Inputs(loss_weight="labels")}} for the '
                f"mean over all labels"
            )

    def _summed(self, value: float) -> float:
        """The sum over all data replicas."""
        if (count := self._replica[1]) == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.args.device)
        dist.all_reduce(total)
        return total.item() * count / dist.get_world_size()

    def store_flos(self) -> None:
        self.current_flos = self._summed(self.current_flos)
        super().store_flos()

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + int(self._summed(self.state.num_input_tokens_seen - before))

    def _built(self, batch: Mapping[str, Any]) -> PipelineModule:
        """The pipeline; the first batch builds it, which a checkpoint needs."""
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
        with self._seen_as(0, 1):  # the loss is that of all replicas
            result: tuple[Any, Any, Any] = super().prediction_step(
                through, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        return result

    def _evaluated(self, *, loss_only: bool, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """The result of `model(**inputs)`, in all processes."""
        (replica, count), num_rows = self._replica, _rows(inputs)
        if num_rows < count:
            count = 1  # all of them evaluate all rows
        parts = [slice(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count)]
        own = _cut(inputs, parts[replica % count])
        pipe = self._built(own)
        if any(inputs.get(name) is not None for name in self.label_names):
            result = pipe.eval_step(**own)
            if loss_only:
                return {"loss": torch.tensor(result.loss, device=self.args.device)}
            outputs = _from_all(result.output, replica)
        else:
            outputs = _from_all(pipe.predict(**own), replica)

        def joined(*pieces: Any) -> Any:
            if not isinstance(pieces[0], torch.Tensor):
                return pieces[0]
            are_rows = all(x.dim() and len(x) == rows.stop - rows.start for x, rows in zip(pieces, parts, strict=True))
            return (torch.cat(pieces) if are_rows else pieces[0]).to(self.args.device)

        return pytree.tree_map(joined, *outputs[:count])

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
        if self.args.should_save:  # all processes draw the same numbers
            with self._seen_as(0, 1):
                super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._seen_as(0, 1):
            super()._load_rng_state(checkpoint)

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
    for field in fields(args):
        value = getattr(args, field.name)
        if value and value != field.default and not _FOLLOWED.fullmatch(field.name):
            raise ValueError(
                f"TrainingArguments({field.name}={value!r:.60}) with a pipeline: expected no such argument, as nothing "
                f"here follows it"
            )
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


def _cut(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    num_rows = _rows(batch)
    return {
        name: x[rows] if isinstance(x, torch.Tensor) and x.dim() and len(x) == num_rows else x
        for name, x in batch.items()
    }


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
        halves = slice(None, num_rows // 2), slice(num_rows // 2, None)
        pieces[longest : longest + 1] = [_cut(piece, rows) for rows in halves]
    if len(pieces) > count:
        raise ValueError(
            f"{len(pieces)} batches of several shapes make no {count} microbatches: expected num_microbatches="
            f"{len(pieces)}, as gradient_accumulation_steps says"
        )
    return pieces


def _from_all(output: object, replica: int) -> list[Any]:
    """What the last stage of each data replica has, by replica."""
    if not dist.is_initialized():
        return [output]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (replica, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, output)))
    return [each for _, each in sorted(dict(pair for pair in found if pair[1] is not None).items())]


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
