"""PipelineAccelerator: accelerate's Accelerator, whose model runs through a pipeline.

accelerate's loop                  here
prepare(model, optimizer, ...)     the model is cut into stages; loaders are divided among data replicas
model(**batch)                     in training all of the batch's forwards and backwards: returns the loss
backward(loss)                     already done; divides summed gradients by gradient_accumulation_steps
clip_grad_norm_                    over all stages
optimizer.step(), scheduler        kept: each process has the gradients of its own stages
gather, reduce                     over data replicas
save_state, load_state             kept: one process writes the files of a plain run
unwrap_model                       the script's model; get_state_dict(model) has the weights of all stages
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils import _pytree as pytree

from ..pipe import Inputs, ModelLoss, PipelineModule
from .shared import from_all, read_pipeline, seen_as

_FOLLOWED = {"mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin", "cpu", "rng_types"}
_FOLLOWED |= {"dataloader_config", "log_with", "project_dir", "project_config", "step_scheduler_with_optimizer"}
_RUN_BY = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class PipelineAccelerator(Accelerator):
    """An Accelerator for one model that returns its own loss; start it with torchrun, one process per rank of the mesh.

    Numbers equal those of a plain Accelerator over as many processes as there are data replicas; a loss is the mean
    over all of them. All processes must call the model that `prepare` returns, and `save_state`.

    Arguments:
        pipeline: arguments of PipelineModule, such as {"schedule": "zb-h1", "mesh": {"pipe": 2, "data": 2}}.
        options: of Accelerator.

    Attributes:
        pipe: the PipelineModule, after `prepare`.

    Raises ValueError for an option that a pipeline cannot follow, with the one to use instead.
    """

    pipe: PipelineModule
    _optimizers: list[Any]

    def __init__(self, *, pipeline: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._pipeline = read_pipeline(pipeline)
        self._loss: torch.Tensor | None = None  # of a batch whose backward() was not called yet
        precision = options.pop("mixed_precision", None) or "no"
        if precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision={precision!r} with a pipeline: expected 'no' or 'bf16'")
        if unknown := [name for name, value in options.items() if value is not None and name not in _FOLLOWED]:
            raise ValueError(f"{unknown[0]}= with a pipeline: expected no such argument, which has no effect here")
        self._precision = None if precision == "no" else precision
        data = options.setdefault("dataloader_config", DataLoaderConfiguration())
        if data.split_batches or not data.even_batches:
            raise ValueError("dataloader_config with a pipeline: expected split_batches=False and even_batches=True")
        data.dispatch_batches = False  # each process reads what it needs
        super().__init__(**options, mixed_precision="no")
        if self.distributed_type not in _RUN_BY:
            raise ValueError(f"{self.distributed_type} with a pipeline: expected torchrun without accelerate's config")

    @property
    def _replica(self) -> tuple[int, int]:
        return self.pipe.replica

    def prepare(self, *args: Any, **options: Any) -> Any:
        models = [each for each in args if isinstance(each, nn.Module)]
        if len(models) > 1 or bool(models) == hasattr(self, "pipe"):
            raise ValueError(f"{len(models)} models to prepare: expected one, in the first call of prepare alone")
        if models:
            self._cut(models[0])
        others = [each for each in args if not isinstance(each, nn.Module)]
        with seen_as((self.state, PartialState()), *self._replica):
            prepared = super().prepare(*others, **options) if others else ()
        left = iter(prepared if isinstance(prepared, tuple) else (prepared,))
        done = tuple(self._models[-1] if isinstance(each, nn.Module) else next(left) for each in args)
        return done if len(done) > 1 else done[0]

    def _cut(self, model: nn.Module) -> None:
        given = self._pipeline.get("example_inputs", Inputs())
        if not isinstance(given, Inputs) or given.example is not None or "optimizer" in self._pipeline:
            raise ValueError(
                f"pipeline={self._pipeline!r:.100}: expected example_inputs=stagewright.Inputs(...) without an "
                f"example, and the optimizer in prepare"
            )
        self._models.append(prepared := PipelinedModel(model, self, ModelLoss(model, given.loss_weight)))
        device = "cpu" if self.device.type == "cpu" else self.device  # fake tensors do not know accelerate's "cpu:0"
        options = {"precision": self._precision, "device": device, "loss_fn": "model", **self._pipeline}
        options["example_inputs"] = replace(given, loss_weight=prepared.weigh)
        self.pipe = PipelineModule(model, **options)
        layout = self.pipe.layout
        if layout is None or layout.schedule.is_asynchronous or layout.place.tensor[1] > 1 or layout.plan is not None:
            raise ValueError(
                f"pipeline={self._pipeline!r:.100}: expected a schedule with a flush, by name, and a mesh without "
                f'"tensor", as the optimizers are the script\'s own'
            )
        self.state.num_processes = PartialState().num_processes = self._replica[1]

    # Steps

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if loss is not self._loss or kwargs:
            raise ValueError(
                "backward(loss) of another loss than the model has just returned: expected that one as it is, since "
                "the pipeline has run its backward already; a model that returns the loss that you want"
            )
        self._loss = None
        if self.sync_gradients and self.gradient_accumulation_steps > 1:
            for parameter in {id(p): p for p in self.pipe.parameters()}.values():
                if parameter.grad is not None:
                    parameter.grad /= self.gradient_accumulation_steps

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if {id(p) for p in given} != {id(p) for p in self._models[0].parameters()}:
            raise ValueError("clip_grad_norm_ of some parameters with a pipeline: expected model.parameters()")
        return torch.tensor(self.pipe.clip_grad_norm_(max_norm, norm_type), device=self.device)

    # Among data replicas

    def gather(self, tensor: Any) -> Any:
        def joined(*pieces: Any) -> Any:
            return torch.cat([x if x.dim() else x[None] for x in pieces]).to(self.device)

        return tensor if self._replica[1] == 1 else pytree.tree_map(joined, *from_all(tensor, self._replica[0]))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduced(*pieces: Any) -> Any:
            total = torch.stack(pieces).sum(0).to(self.device)
            total = total if scale == 1.0 else total * scale  # integers stay integers
            return total / len(pieces) if reduction == "mean" else total

        pieces = [tensor] if self._replica[1] == 1 else from_all(tensor, self._replica[0])
        return tensor if reduction == "none" else pytree.tree_map(reduced, *pieces)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data)):
            raise ValueError("gather_for_metrics of objects with a pipeline: expected tensors")
        return super().gather_for_metrics(input_data)

    def split_between_processes(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("split_between_processes with a pipeline: expected a DataLoader in prepare, which is divided")

    # The whole state

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        own, self._optimizers = self._optimizers, [_Whole(each) for each in self._optimizers]
        try:
            return super().save_state(*args, **kwargs)
        finally:
            self._optimizers = own

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The script's own model, of which each process holds its stages; `get_state_dict(model)` has all weights."""
        plain: nn.Module = model.module if isinstance(model, PipelinedModel) else super().unwrap_model(model)
        return plain

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """State dict with the weights of all stages, in all processes. All of them must call it."""
        return model.state_dict() if isinstance(model, PipelinedModel) else super().get_state_dict(model, unwrap)

    def save_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "save_model with a pipeline: expected accelerator.unwrap_model(model).save_pretrained(folder, state_dict="
            "accelerator.get_state_dict(model)) in all processes, or safetensors of that state_dict"
        )

    def end_training(self) -> None:
        self.pipe.close()
        super().end_training()


class PipelinedModel(nn.Module):
    """The model that `prepare` returns: in training `model(**batch)` has the loss alone, in evaluation all outputs."""

    def __init__(self, module: nn.Module, accelerator: PipelineAccelerator, counting: ModelLoss) -> None:
        super().__init__()
        self.module = module
        self._accelerator = accelerator
        self._counting = counting
        self._total = 1.0  # weight of this replica's current batch, by which `weigh` divides: replicas count equally
        first: dict[int, str] = {}
        pairs = [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False)]
        self._tied = {name: first.setdefault(key, name) for name, key in pairs}

    def weigh(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The pipeline's loss_weight: a microbatch's share of this replica's batch."""
        (count,) = self._counting.weigh([self._accelerator.pipe.read(*args, **kwargs)])
        return count / self._total

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        accelerator, pipe = self._accelerator, self._accelerator.pipe
        if self.training and (accelerator._loss is not None or not torch.is_grad_enabled()):
            raise ValueError(
                "the model in training, within torch.no_grad() or without backward(loss) since the last call: "
                "expected accelerator.backward(loss) after each call, or model.eval()"
            )
        self._total = 1.0
        if kwargs.get("labels") is None and not self.training:
            output = pipe.predict(*args, **kwargs)
        else:
            if self.training:
                pipe.verify_if_due(*args, **kwargs)  # with all replicas' microbatches weighed alike
            self._total = float(self.weigh(*args, **kwargs)) or 1.0
            if self.training:
                loss = torch.tensor(pipe.forward_backward(*args, **kwargs).loss, device=accelerator.device)
                accelerator._loss = loss
                return _Trained(loss)
            output = pipe.eval_step(*args, **kwargs).output
        replica = accelerator._replica[0]
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(accelerator.device), from_all(output, replica)[replica]
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        pipe = self._accelerator.pipe
        state = pipe.full_state_dict() if pipe.is_built else self.module.state_dict()
        return OrderedDict((name, state[self._tied.get(name, name)]) for name in state)  # ties as accelerate has them

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if not self._accelerator.pipe.is_built:
            return self.module.load_state_dict(state_dict, strict, assign)
        known = self.state_dict()
        given = {self._tied.get(name, name): value for name, value in state_dict.items()}
        unknown = [name for name in state_dict if name not in known]
        if strict and (unknown or any(self._tied.get(name, name) not in given for name in known)):
            raise ValueError(f"a state dict of {len(state_dict)} tensors: expected the names of model.state_dict()")
        whole = {name: given.get(self._tied.get(name, name), value) for name, value in known.items()}
        self._accelerator.pipe.load_state_dict(whole)
        return [name for name in known if name not in state_dict], unknown


class _Trained(NamedTuple):
    """Output of a batch in training; the model's other outputs stay on the last stage."""

    loss: torch.Tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} in training, which stays on the pipeline's last stage: expected model.eval()")


class _Whole(NamedTuple):
    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {number: value for number, value in state["state"].items() if not parameters[number].is_meta}
        rank = self.optimizer.accelerator_state.process_index
        every: Iterable[Mapping[int, Any]] = from_all(own, rank)
        return {**state, "state": {number: value for part in every for number, value in part.items()}}
