"""PipelineTrainer: transformers' Trainer, whose forwards, backwards and updates run through a pipeline.

    Trainer's loop                          here
    training_step       per batch           the last call of a step passes all k batches to pipe.train_step
    clip, optimizer     over the model      already done by the pipeline; parameters have no gradient any more
    lr_scheduler        over that           runs as usual; its rates are copied to the pipeline's optimizers
    prediction_step     model(**inputs)     pipe.eval_step; the output goes from the last stages to all processes

Each process runs the whole loop as if it were alone, so that all make the same decisions; only the first one logs and
writes. Data replicas read the batches that Trainer's processes would, and each evaluates some rows of every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainingArguments

from ..pipe import Inputs, ModelLoss, PipelineModule, named
from .refusals import divides_by_items, refuse_arguments, refuse_callbacks, refuse_overridden
from .shared import Batch, arranged, cut, from_all, num_rows, one_each, read_pipeline, seen_as

_FOLDER = "pipeline"  # in a checkpoint, next to Trainer's files


class PipelineTrainer(Trainer):
    """A Trainer for a model that is cut into stages; start it with torchrun, one process per rank of the mesh.

    One step is a batch of gradient_accumulation_steps microbatches of per_device_train_batch_size samples each, in
    every data replica. Logged losses, norms, rates and metrics are those of the whole batch, and equal, up to rounding,
    those of a Trainer over as many processes as there are replicas. `save_model` and checkpoints have the whole model
    in transformers' format, and a folder with the pipeline's own state: call them in all processes. In `trainer.model`
    only this process's stages are trained; `trainer.pipe.full_state_dict()` has all of them.

    Arguments:
        args, kwargs: of Trainer.
        pipeline: arguments of PipelineModule, such as {"schedule": "zb-h1", "mesh": {"pipe": 4}}. Those that
            TrainingArguments has (optimizer, max_grad_norm, bf16, seed) are taken from there.

    Attributes:
        pipe: the PipelineModule; None before the first batch.

    Raises ValueError for an argument that a pipeline cannot follow, with the one to use instead.
    """

    pipe: PipelineModule | None = None
    current_flos: float
    _trained: nn.Module | None = None  # the model that it trains

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._pipeline = read_pipeline(pipeline)
        self._batches: list[Batch] = []  # of the current step
        self._resumed: Path | None = None  # a checkpoint that the pipeline loads as soon as it is built
        self._norm: float | None = None
        self._divides: bool | None = None  # whether the model divides its loss by num_items_in_batch, as it says
        self._batches_are_equal = False  # in the loss of a step, however many labels they have
        refuse_overridden(self, PipelineTrainer)
        given = next((each for each in [*args, *kwargs.values()] if isinstance(each, TrainingArguments)), None)
        if given is not None:
            _be_alone(given)
        super().__init__(*args, **kwargs)
        _be_alone(self.args)
        self.__dict__["get_train_dataloader"] = partial(self._train_dataloader, self.get_train_dataloader)
        self._refuse()

    def _refuse(self) -> None:
        refuse_overridden(self, PipelineTrainer)
        refuse_callbacks(self.callback_handler.callbacks)
        if self.compute_loss_func is not None:
            raise ValueError(
                f"compute_loss_func={self.compute_loss_func!r:.60}: expected a model that returns its loss"
            )
        if self.loss_is_scaled_for_ga is not None:
            raise ValueError(
                f"loss_is_scaled_for_ga={self.loss_is_scaled_for_ga} with a pipeline: expected None, as the model's "
                f"loss is that of compute_loss"
            )
        given = self._pipeline.get("example_inputs", Inputs())
        if not isinstance(given, Inputs) or given.example is not None:
            raise ValueError(
                'pipeline={"example_inputs": ...}: expected stagewright.Inputs(...) without an example, as the first '
                "batch builds the stages"
            )
        if self._pipeline.get("loss_fn", "model") != "model":
            raise ValueError(
                f"pipeline={{'loss_fn': {self._pipeline['loss_fn']!r:.60}}}: expected a model that returns its loss"
            )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("hyperparameter_search with a pipeline: expected a run for each choice, of its own processes")

    # What is put together

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        kwargs["dataloader_config"].dispatch_batches = False  # each process reads what it needs
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the pipeline has its own

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: each process moves its own stages."""

    def _made(self) -> PipelineModule:
        if self.pipe is not None and self._trained is self.model:
            return self.pipe
        if self.pipe is not None:
            self.pipe.close()
        self._trained = self.model
        if (config := getattr(self.model, "config", None)) is not None:
            config.use_cache = self.args.use_cache  # as Trainer does, but for what model_init makes anew
        self._stage_optimizer([])  # raises errors now
        options: dict[str, Any] = {
            "num_microbatches": self.args.gradient_accumulation_steps,
            "max_grad_norm": self.args.max_grad_norm or math.inf,  # Trainer logs the norm in any case
            "precision": "bf16" if self.args.bf16 else None,
            "seed": self.args.seed,
            "device": self.args.device,
            "loss_fn": "model",
            "optimizer": named(self._stage_optimizer),
        }
        options |= self._pipeline
        if not self.model_accepts_loss_kwargs and self._weight_given is None:
            options["example_inputs"] = replace(options.get("example_inputs", Inputs()), loss_weight=self._weight)
        self.pipe = PipelineModule(self.model, **options)
        self._counting = ModelLoss(self.model, None)
        self.args.distributed_state.num_processes = self.pipe.replica[1]
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            raise ValueError(f"{self.args.world_size} data replicas: expected average_tokens_across_devices=True")
        if self.args.world_size > 1 and not self.args.accelerator_config.even_batches:
            raise ValueError(f"{self.args.world_size} data replicas: expected even_batches=True of accelerator_config")
        return self.pipe

    def _stage_optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Optimizer of a stage, like the one of Trainer over the whole model, which is used for its rates alone."""
        if self.optimizer is None:
            self.create_optimizer()
        return _like(self.optimizer, self.model, parameters)

    @property
    def _replica(self) -> tuple[int, int]:
        return self._made().replica

    def _seen_as(self, index: int, count: int) -> AbstractContextManager[None]:
        return seen_as((self.args.distributed_state, self.accelerator.state), index, count)

    def _train_dataloader(self, make: Callable[[], Any]) -> Any:
        """Loader, also of a subclass, as in one of as many processes as there are replicas. Training begins."""
        self._refuse()
        self._batches.clear()
        with self._seen_as(*self._replica):
            return make()

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> Any:
        """The same batches in all processes of a replica, also those that workers draw; to evaluate, in all."""
        with self._seen_as(*self._replica if is_training else (0, 1)):
            return super()._get_dataloader(dataset, description, batch_size, *args, is_training=is_training, **kwargs)

    # Training

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self.model.train()  # as Trainer does: from_pretrained, and each evaluation, leave it in the other mode
        self._batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._batches = self._batches, []
        self._batches_are_equal, batch = self._arranged(batches, num_items_in_batch)
        self._check_weights(batches, num_items_in_batch)
        pipe = self._built(batch)
        if pipe.schedule.is_asynchronous:
            raise ValueError(f"{pipe.schedule!r} returns the loss of a batch later: expected a schedule with a flush")
        for optimizer in pipe.optimizers:
            for group, rates in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
                group.update({name: value for name, value in rates.items() if name != "params"})
        result = pipe.train_step(**batch)
        self._batches_are_equal = False
        assert result.loss is not None
        self._norm = result.grad_norm
        return torch.tensor(result.loss, device=self.args.device)

    def _arranged(self, batches: Sequence[Batch], num_items: Any) -> tuple[bool, Batch]:
        """(whether each batch is a microbatch, all of one weight; arguments of train_step)."""
        count = self._num_microbatches
        if num_items is None and self._weight_given is None and not self.model_accepts_loss_kwargs:
            microbatches = one_each(batches, count)
            if microbatches is not None:
                return True, {"microbatches": microbatches}
        return False, arranged(batches, count)

    @property
    def _weight_given(self) -> Any:
        return getattr(self._pipeline.get("example_inputs"), "loss_weight", None)

    def _weight(self, **arguments: Any) -> Any:
        """A microbatch's weight in the loss; without a number of labels, Trainer takes the mean of batches' losses."""
        (count,) = self._counting.weigh([self._made().read(**arguments)])
        return count.clamp(max=1) if self._batches_are_equal else count

    @property
    def _num_microbatches(self) -> int:
        layout, count = self._made().layout, int(self.args.gradient_accumulation_steps)
        # Members of a context group are replicas, too.
        return count if layout is None else layout.schedule.num_microbatches // layout.place.replica[1]

    def _check_weights(self, batches: Sequence[Batch], num_items: Any) -> None:
        """Raises ValueError if Trainer weights batches differently, unless the user sets the weight."""
        if self._weight_given is not None or self._batches_are_equal:
            return
        num_batches = len(batches) * self._replica[1]
        if num_items is not None:
            if num_batches > 1 and not self._is_divided(batches[0]):
                raise ValueError(
                    f"num_items_in_batch does not divide all of the loss of {type(self.model).__name__}, so that "
                    f"Trainer trains on a sum over {num_batches} batches, and not on their mean: expected "
                    f"model.accepts_loss_kwargs = False before the trainer is made, which plain Trainer needs, too"
                )
            self._check_count(batches, num_items)
            return
        counts = self._counts(batches)
        if self._summed(sum(counts)) != counts[0] * num_batches or len({*counts}) > 1:
            raise ValueError(
                f"Trainer gives the batches of a step equal weights, though their losses are means over {counts} "
                f"labels: expected dataloader_drop_last=True and a microbatch for each of the batches; or "
                f'pipeline={{"example_inputs": stagewright.Inputs(loss_weight="labels")}} for the mean over all labels'
            )

    def _check_count(self, batches: Sequence[Batch], num_items: Any) -> None:
        if self._weight_given is not None or sum(counts := self._counts(batches)) == float(num_items):
            return
        if self._is_divided(batches[0]):
            raise ValueError(
                f"Trainer divides the loss of {sum(counts):.0f} labels by {float(num_items):.0f}, as it counts labels "
                f"of a model with loss_type={getattr(self.model, 'loss_type', None)!r}: expected model.loss_type = "
                f'"ForCausalLM" before the trainer is made, if the model shifts labels'
            )

    def _counts(self, batches: Sequence[Batch]) -> list[float]:
        return [float(w) for w in self._counting.weigh([self._made().read(**batch) for batch in batches])]

    def _is_divided(self, batch: Batch) -> bool:
        """Whether num_items_in_batch divides all of the model's loss, as its forward suggests."""
        if self._divides is None:
            example = self._made().read(**batch)
            self._divides = divides_by_items(self.model, example, self.args.device)
        return self._divides

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
        pipe = self._made()
        pipe.build(**batch)
        if self._resumed is not None:
            pipe.load(self._resumed)
            self._resumed = None
        return pipe

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
        (replica, count), size = self._replica, num_rows(inputs)
        if num_items_in_batch is not None:
            self._check_count([inputs], num_items_in_batch)
        parts: tuple[torch.Tensor, ...] = torch.arange(size).tensor_split(count if size >= count else 1)
        own = cut(inputs, parts[replica % len(parts)])
        pipe = self._built(own)
        if count == 1:
            replica, parts = _shares_of_last_stage(pipe, parts[0])
        if any(inputs.get(name) is not None for name in self.label_names):
            result = pipe.eval_step(**own)
            if loss_only:
                return {"loss": torch.tensor(result.loss, device=self.args.device)}
            outputs = from_all(result.output, replica)
        else:
            outputs = from_all(pipe.predict(**own), replica)
        order = torch.cat(parts).argsort()

        def joined(*pieces: Any) -> Any:
            if not isinstance(pieces[0], torch.Tensor):
                return pieces[0]
            are_rows = all(x.dim() and len(x) == len(rows) for x, rows in zip(pieces, parts, strict=True))
            return (torch.cat(pieces)[order] if are_rows else pieces[0]).to(self.args.device)

        return pytree.tree_map(joined, *outputs[: len(parts)])

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.pipe is not None and self.pipe.is_built:
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
    refuse_arguments(args)
    if args.device.type and args.distributed_state is not None:
        args.distributed_state.distributed_type = DistributedType.NO
        args.distributed_state.num_processes = 1


def _like(
    optimizer: torch.optim.Optimizer, model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {name: group_of.get(id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    groups = [
        {**group, "params": [p for name, p in parameters if names[name] == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    kind: Any = type(getattr(optimizer, "optimizer", optimizer))  # below accelerate's
    if not kind.__module__.startswith(("torch.optim.", "transformers.")):
        raise ValueError(
            f"an optimizer of {kind.__module__}.{kind.__name__}: expected one of torch.optim or transformers, as "
            f"each stage makes its own from the options of its groups"
        )
    made: torch.optim.Optimizer = kind(groups)
    return made


def _shares_of_last_stage(pipe: PipelineModule, rows: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Number of this process among those of the last stage, and the rows of each, as a plan divides one batch."""
    layout = pipe.layout
    assert layout is not None
    owners = layout.schedule.owners[-1]
    microbatches = rows.tensor_split(min(len(rows), layout.schedule.num_microbatches))
    if len(layout.place.local_ranks) > 1 or len(owners) == 1:
        return 0, (rows,)
    shares = tuple(torch.cat(microbatches[i :: len(owners)]) for i in range(min(len(owners), len(microbatches))))
    (rank,) = layout.place.local_ranks
    return owners.index(rank) if rank in owners else 0, shares


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
