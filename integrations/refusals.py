"""Options of a Trainer that a pipeline cannot follow: an error before training names what to use instead."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import fields

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..partition.model.fakes import on_fakes
from ..partition.model.forms import Arguments
from ..partition.model.model_loss import mean_of_model

# Arguments of TrainingArguments that are followed, or have no effect here; others must have their defaults.
_FOLLOWED = re.compile(
    "output_dir|max_.*|num_train_epochs|learning_rate|lr_.*|warmup_.*|optim|optim_args|weight_decay|adam_.*|bf16|tf32|"
    "use_cpu|use_cache|gradient_accumulation_steps|average_tokens.*|per_device_.*|logging_.*|log_.*|include_.*|"
    "disable_tqdm|report_to|run_name|project|trackio_.*|eval_.*|prediction_loss_only|batch_eval_metrics|save_.*|"
    "push_to_hub|hub_.*|load_best_model.*|metric_for_best.*|greater_is_better|ignore_data_skip|restore_callback_.*|"
    "full_determinism|seed|data_seed|accelerator_config|dataloader_.*|remove_unused_columns|label_names|"
    "train_sampling_.*|length_column_name|ddp_.*|fsdp_config|skip_memory_metrics|do_.*|resume_from_checkpoint|local_rank"
)
_REFUSED = {  # arguments of TrainingArguments, and what to type instead
    "deepspeed": "no such argument, as the pipeline divides the model",
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
_BYPASSED = {  # methods of Trainer, and what to type instead
    **dict.fromkeys(
        ("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "training_step"),
        "a model that returns the loss that you want",
    ),
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm"), 'pipeline={"max_grad_norm": ...}'),
}
_AT_GRADIENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")  # callbacks that can read them


def refuse_arguments(args: TrainingArguments) -> None:
    for name, instead in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={value!r}) with a pipeline: expected {instead}")
    for field in fields(args):
        value = getattr(args, field.name)
        if value and value != field.default and not _FOLLOWED.fullmatch(field.name):
            raise ValueError(
                f"TrainingArguments({field.name}={value!r:.60}) with a pipeline: expected no such argument, which "
                f"has no effect here"
            )


def refuse_overridden(trainer: Trainer, base: type[Trainer]) -> None:
    """Raises ValueError for methods, overridden or assigned, that a step through the pipeline bypasses."""
    for name, instead in _BYPASSED.items():
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(base, name):
            raise ValueError(
                f"{type(trainer).__name__}.{name} would never be called, as the pipeline runs forwards and backwards: "
                f"expected {instead}"
            )


def refuse_callbacks(callbacks: Iterable[TrainerCallback]) -> None:
    """Raises ValueError for callbacks that read gradients, which are gone after a step through the pipeline."""
    for callback in callbacks:
        for name in _AT_GRADIENTS:
            if getattr(type(callback), name, None) not in (None, getattr(TrainerCallback, name)):
                raise ValueError(
                    f"{type(callback).__name__}.{name} would see no gradients, as the pipeline's step ends with the "
                    f"update: expected on_step_end, or state.log_history for the norm"
                )


def divides_by_items(model: nn.Module, example: Arguments, device: torch.device) -> bool:
    """Whether all of the loss is divided by num_items_in_batch, by its graph on fake tensors; True if that cannot be
    seen.

    A forward that takes any keyword may ignore this one, which Trainer cannot see. Losses of routers always do.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return False
    try:
        with on_fakes(model, example, device=device, training=True) as (given, *_):
            num_items = torch.ones((), device=device, requires_grad=True)
            loss = mean_of_model(given.call(lambda *args, **kw: model(*args, **kw, num_items_in_batch=num_items)))
            return torch.autograd.grad(loss, num_items, allow_unused=True)[0] is not None
    except Exception as error:  # the user's code may read values
        warnings.warn(
            f"whether num_items_in_batch divides the loss of {type(model).__name__} cannot be seen ({error!s:.80}): if "
            f"not, Trainer trains on the sum of the batches' losses, and this one on their mean",
            stacklevel=2,
        )
        return True
