"""What a program does to its model between steps, alike in one process and around a pipeline."""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import reads
from .blocks import Block, Cached
from .models import Own, blocks_of


def _doubled(module: Any, args: Any, out: Any) -> Any:
    return out * 1.25 if isinstance(out, torch.Tensor) else out


def _shifted(module: Any, args: Any) -> Any:
    is_one = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
    return (args[0] + 0.2, *args[1:]) if is_one else None


def _graded(module: Any, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 1.5 for grad in inputs)


def _graded_before(module: Any, outputs: Any) -> Any:
    return tuple(grad * 0.5 for grad in outputs)


def _weights(module: Any) -> list[nn.Parameter]:
    return [p for p in module.parameters() if not p.is_meta]


def _plain() -> Any:
    block = Block()
    block.fc = nn.Identity()
    return block


def _children(model: Any) -> Any:
    return model.blocks if isinstance(model, Own) and hasattr(model, "blocks") else model


def _edit(block: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in _weights(block):
            parameter.mul_(value)


def _edit_data(block: Any, value: float) -> None:
    for parameter in _weights(block):
        parameter.data = parameter.data * value


_HANDLES: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def _keep(module: nn.Module, handle: Any) -> None:
    _HANDLES.setdefault(module, []).append(handle)


def _unhook(block: Any, value: float) -> None:
    for handle in _HANDLES.pop(block, []):
        handle.remove()


def _buffers(block: Any, value: float) -> None:
    for buffer in block.buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            buffer.mul_(value)


def _hook_parameter(block: Any, value: float) -> None:
    for parameter in _weights(block)[:1]:
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad * value)


def _scale(model: Any, value: float) -> None:
    with torch.no_grad():
        model.reads_scale.fill_(value)


ON_BLOCKS: dict[str, Callable[[Any, float], Any]] = {
    "alpha": lambda block, value: setattr(block, "alpha", value),
    "options": lambda block, value: block.options["beta"].__setitem__(0, value),
    "new-options": lambda block, value: setattr(block, "options", {"beta": [value]}),
    "class-attribute": lambda block, value: setattr(Block, "alpha", value),
    "function": lambda block, value: setattr(block, "function", torch.sin),
    "eval": lambda block, value: block.eval(),
    "train": lambda block, value: block.train(),
    "edit": _edit,
    "edit-data": _edit_data,
    "freeze": lambda block, value: block.requires_grad_(False),
    "unfreeze": lambda block, value: block.requires_grad_(True),
    "unhook": _unhook,
    "buffers": _buffers,
    "hook-parameter": _hook_parameter,
    "hook": lambda block, value: _keep(block, block.register_forward_hook(_doubled)),
    "pre-hook": lambda block, value: _keep(block, block.register_forward_pre_hook(_shifted)),
    "backward-hook": lambda block, value: _keep(block, block.register_full_backward_hook(_graded)),
    "backward-pre-hook": lambda block, value: _keep(block, block.register_full_backward_pre_hook(_graded_before)),
    "inner-hook": lambda block, value: next(iter([*block.children(), block])).register_forward_pre_hook(_shifted),
}
ON_MODELS: dict[str, Callable[[Any, float], Any]] = {
    "read": lambda model, value: reads.READS[model.kind.reads][1](model, value),
    "eval-model": lambda model, value: model.eval(),
    "train-model": lambda model, value: model.train(),
    "root-hook": lambda model, value: model.register_forward_hook(_doubled),
    "root-pre-hook": lambda model, value: model.register_forward_pre_hook(_shifted),
    "append": lambda model, value: _children(model).append(_plain()),
    "delete": lambda model, value: _children(model).__delitem__(len(_children(model)) - 1),
    "replace": lambda model, value: _children(model).__setitem__(len(_children(model)) - 1, _plain()),
    "scale": _scale,
    "copy": lambda model, value: copy.deepcopy(model),
}
VALUES = {"edit", "edit-data", "scale", "buffers"}  # what a checkpoint holds


def change(model: Any, kind: str, block: int, value: float) -> None:
    """Carries out one change; `block` counts from 0, modulo how many there are."""
    if kind in ON_MODELS:
        ON_MODELS[kind](model, value)
        return
    blocks = blocks_of(model)
    ON_BLOCKS[kind](blocks[block % len(blocks)], value)


def reset() -> None:
    Block.alpha, Cached.longest = 1.0, None
    Cached.tables.clear()
    reads.reset()
