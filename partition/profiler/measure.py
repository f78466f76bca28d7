"""The profiler: what each unit of a model costs on the device where the model is."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...schedules.actions import Op
from ...schedules.messages import ALONE_BYTES
from ...schedules.timing.measured_inputs import typical
from ..deferred.filling import lent
from ..model.batch_dims import BatchDims, check_batch_dims, parameter_names, with_dims
from ..model.chain import is_sequential
from ..model.forms import Arguments, Tensors, copied, counted_changes
from ..model.model_loss import MODEL, mean_of_model
from ..model.model_units import model_units
from ..model.source_line import first_line, users_line
from ..model.units import MODEL_INPUT, Agree
from ..profile import Node, Profile, Tied
from ..strict import made_of
from .clock import Clock, clock_for, fastest, spread_of
from .memory import bytes_of, keep_freed_memory, peaks
from .optimizers import OptimizerFactory, optimizers_of_copies
from .passes import Passes, Sample, Traffic, profiled, slice_shares

WARM_UP = 2  # passes that do not count; one where it takes long
LEAST = 3  # passes that count, however long they take
LESS_SHARE = 0.1  # of the time, for the passes that measure what it costs to keep less
UPDATES = 5  # optimizer steps that are timed, after one that makes its state

NO_TARGET = "none"  # of a model's own loss

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `profile_model`, which says what they mean."""

    batch_dims: BatchDims | None = None
    target: Any = None
    loss_fn: LossFunction | str | None = None
    optimizer: OptimizerFactory | None = None
    autocast: torch.dtype | None = None
    repetitions: int = 30
    seconds: float = 10.0
    split_backward: bool = True
    tensor: int = 1
    sequence_dim: int | None = None
    traffic: Traffic | None = None
    progress: Callable[[str], None] | None = None
    agree: Agree | None = None


def profile_model(
    model: nn.Module, example_inputs: Sequence[object] | Mapping[str, object] | Arguments, **options: Any
) -> Profile:
    """Measure every cut unit of a model: the children of an nn.Sequential, or the modules of any other model.

    Units run as stages of a pipeline would, in the model's own mode (training or evaluation) and on its device; see
    `passes`. Figures are medians of the fastest quarter of the samples. Units that are equal (classes,
    attributes, shapes, layouts) are timed once, and their descriptions say as which. Activations, parameters and
    buffers are counted for each: a tensor that several share, with the first. I and W are timed as they run in a
    pipeline, a little more than B together; what gives the gradients of its weights with those of its inputs
    (`model.split_backward` says what does) has them in I, to which counts what such a forward takes longer as well. Of
    units with GELUs, whose results a backward can make again, it is measured what that frees and takes. Where a unit
    has no parameters, or no input wants a gradient, the one that is left is B. Weights, gradients, buffers, training
    flags and random generators stay as they are.

    Arguments:
        example_inputs: arguments of ONE microbatch: a tuple, or a dict of keywords.

    Options:
        batch_dims: dimension of the batch by name or position, see PipelineModule; 0 by default.
        target: for `loss_fn`.
        loss_fn: (output, target) -> scalar mean, or (sum, count); it counts to the last unit. "model": the model
            returns its own loss.
        optimizer: makes the optimizers of a stage, as that of PipelineModule; they step on copies. None: no update is
            measured.
        autocast: run forwards under torch.autocast with this type.
        repetitions: passes that count, at most.
        seconds: stop earlier after so long [s]; LEAST passes are made in any case.
        split_backward: whether I and W are measured.
        tensor: ranks over which the model is cut; it is that of one of them, alone.
        sequence_dim: dimension of tokens in the tensors that have one, of a causal model, whose first half and quarter
            are profiled, too: a plan may cut its sequences then.
        traffic: reported by the model, of its sums over those ranks.
        progress: called with what is being done.
        agree: compares the units with those of other processes; None: there are none.

    Raises ValueError for a model that cannot be recorded, inputs that do not fit, a loss without target, and an
    optimizer that needs a closure.
    """
    loss_fn = options.get("loss_fn")
    if not any(each.is_meta or each.is_cuda for each in model.parameters()):
        keep_freed_memory()  # as a run does, but for models built without memory
    with lent(model, *([loss_fn] if isinstance(loss_fn, nn.Module) else []), alike=True):
        return _measured(model, example_inputs, options)


def _measured(
    model: nn.Module, example_inputs: Sequence[object] | Mapping[str, object] | Arguments, options: dict[str, Any]
) -> Profile:
    given = made_of(ProfileOptions, options, "profile_model")
    tell = given.progress or (lambda text: None)
    arguments = _arguments(model, example_inputs, given.batch_dims)
    loss, target = _loss_option(given.loss_fn, given.target)
    _check(arguments, target, loss, given.repetitions, given.seconds)
    device = next((p.device for p in model.parameters()), arguments.tensors[0].device)
    clock = clock_for(device)
    arguments = arguments.map(lambda x: x.detach().to(device))
    if isinstance(target, torch.Tensor):
        target = target.to(device)
    learns = [model, given.loss_fn] if isinstance(given.loss_fn, nn.Module) else [model]
    with profiled(*learns, device=device), torch.enable_grad():
        tell(f"cutting {type(model).__name__} into units")
        passes = Passes(
            model_units(model, arguments, enter_unit=None, agree=given.agree),
            arguments,
            loss=None if loss is None else _again_and_again(loss, target),
            apart=[*model.parameters(), *model.buffers()],
            autocast=given.autocast,
            clock=clock,
        )
        tell(f"{len(passes.samples)} units, {len(passes.firsts)} of them different")
        share = 1 - LESS_SHARE * bool(passes.saved)
        turns = (passes.run_units, passes.run_whole, *([passes.run_split] if given.split_backward else []))
        _repeat(turns, given.repetitions, given.seconds * share, tell, what="forward, backward")
        if passes.saved:
            _repeat((passes.run_less,), given.repetitions, given.seconds * LESS_SHARE, tell, what="keeping less")
        tell("memory")
        workspaces = _workspaces(passes, device)
        sums = {i: passes.traffic(i, given.traffic) for i in passes.firsts} if given.traffic is not None else {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        is_open = given.tensor == 1 and is_sequential(model)
        splits = {i: "any" if is_open and passes.by_samples(i) else "divided" for i in passes.firsts}
        made = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if given.optimizer is not None and made:
            torch._foreach_zero_(made)
            passes.run_whole(keep=False)  # gradients as a step makes them, zeros where it makes none
        updates = {i: _update(passes.samples[i], given.optimizer, names, made, clock) for i in passes.firsts}
        kv_share = 0.0 if given.sequence_dim is None else passes.kv_share()
    measured = updates if given.optimizer else None
    found = _profile(model, passes, workspaces, measured, device=device, autocast=given.autocast)
    pairs = zip(found.nodes, passes.samples, strict=True)
    nodes = [replace(node, split=splits[sample.like], **sums.get(sample.like, {})) for node, sample in pairs]
    found = replace(found, nodes=tuple(nodes), tensor=given.tensor)
    if given.sequence_dim is None:
        return found
    quick = {**options, "split_backward": False, "optimizer": None, "sequence_dim": None}
    again = partial(profile_model, model, **quick)
    shares = slice_shares(arguments, given.target, given.sequence_dim, found.step_seconds, again)
    return replace(found, kv_share=kv_share, **shares)


def _arguments(
    model: nn.Module, example: Sequence[object] | Mapping[str, object] | Arguments, batch_dims: BatchDims | None
) -> Arguments:
    if isinstance(example, Arguments):
        return example
    signature = None if is_sequential(model) else inspect.signature(model.forward)
    dims = check_batch_dims(batch_dims, signature)
    return with_dims(Arguments.of_example(example), dims, parameter_names(signature))


def _loss_option(loss_fn: LossFunction | str | None, target: object) -> tuple[LossFunction | None, object]:
    """The loss, and its target; ValueError for another word than "model"."""
    if not isinstance(loss_fn, str):
        return loss_fn, target
    if loss_fn != MODEL or target is not None:
        raise ValueError(
            f"loss_fn={loss_fn!r}{'' if target is None else ' with target='}: expected a function of (output, target), "
            f"or {MODEL!r}, without target=, for a model that returns its own loss"
        )
    return mean_of_model, NO_TARGET


def _check(arguments: Arguments, target: object, loss_fn: object, repetitions: int, seconds: float) -> None:
    if not arguments.tensors:
        raise ValueError(
            f"example_inputs={arguments} has no tensor: expected the arguments of one microbatch, as in "
            f"example_inputs=(x,)"
        )
    if not arguments.sizes:
        raise ValueError(f"example_inputs: {arguments.names[0]} is a scalar: expected a tensor, batch first")
    if len(set(arguments.sizes)) > 1:
        raise ValueError(
            f"example_inputs={arguments} have batch sizes {list(arguments.sizes)}: expected the same number in "
            f"dimension 0, or batch_dims={{name: dimension, or None for an input without batch}}"
        )
    if (loss_fn is None) != (target is None):
        given, missing = ("loss_fn", "target") if target is None else ("target", "loss_fn")
        raise ValueError(f"{given}= without {missing}=: expected both, or neither (the loss belongs to the last unit)")
    if repetitions < 1 or not 0 < seconds < math.inf:
        raise ValueError(f"repetitions={repetitions}, seconds={seconds}: expected at least 1, and a number above 0")


def _again_and_again(loss_fn: LossFunction, target: object) -> Callable[[Any], Tensors]:
    """A function from an output to its loss with this target, or, if its first call changes the target in place, with a
    new copy each time."""
    changes: bool | None = None

    def run(output: Any) -> Tensors:
        nonlocal changes
        own = target if changes is False else copied(target)
        before = counted_changes(own)
        loss = _loss(loss_fn, output, own)
        if changes is None:
            changes = counted_changes(own) != before
        return (loss,)

    return run


def _loss(loss_fn: LossFunction, output: Any, target: Any) -> torch.Tensor:
    """The tensor whose backward runs: a mean, or the sum of (sum, count)."""
    try:
        value = loss_fn(output, target)
    except (RuntimeError, TypeError, IndexError) as error:
        forms = [
            f"{tuple(each.shape)} {each.dtype}" if isinstance(each, torch.Tensor) else type(each).__name__
            for each in (output, target)
        ]
        raise ValueError(
            f"loss_fn cannot take the output {forms[0]} and the target {forms[1]}{users_line(error)}: "
            f"{first_line(error)}. Expected target= of the same microbatch as example_inputs"
        ) from error
    loss = value[0] if isinstance(value, tuple | list) and len(value) == 2 else value
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned {type(loss).__name__}: expected a scalar tensor; return loss.mean(), or (sum, count)"
        )
    return loss


def _repeat(
    passes: Sequence[Callable[..., None]], repetitions: int, seconds: float, tell: Callable[[str], None], *, what: str
) -> None:
    """Make these passes in turn: WARM_UP times without, then with a record, until repetitions or time are used up."""
    started = told = time.perf_counter()
    for turn in range(-WARM_UP, repetitions):
        now = time.perf_counter()
        if turn >= LEAST and now - started > seconds:
            break
        if turn == -1 and now - started > seconds / LEAST:
            continue  # one has to do
        if now - told > 1 or turn == -WARM_UP:
            tell(f"{what}: pass {max(turn, 0)} of at most {repetitions}, {now - started:.0f} s of {seconds:.0f}")
            told = now
        for each in passes:
            each(keep=turn >= 0)


def _workspaces(passes: Passes, device: torch.device) -> dict[int, int]:
    """The larger of F's and B's passing memory, for the first of equal units [bytes]."""
    actions: list[Callable[[], object]] = []
    kept: dict[int, tuple[Tensors, Tensors]] = {}

    def forward(index: int) -> None:
        kept[index] = passes.forward(index)

    def backward(index: int) -> object:
        leaves, outputs = kept.pop(index)
        if outputs:
            torch.autograd.backward(outputs, passes.samples[index].gradients)
        return leaves

    for index in passes.firsts:
        actions += [lambda index=index: forward(index), lambda index=index: backward(index)]  # type: ignore[misc]
    found = peaks(actions, device)
    result = {}
    for place, index in enumerate(passes.firsts):
        (top, stays), (back_top, _) = found[2 * place], found[2 * place + 1]
        gradients = bytes_of(x for x in passes.samples[index].inputs if x.requires_grad)
        result[index] = max(0, top - max(0, stays), back_top - gradients)
    return result


_Update = tuple[float, int, int]  # seconds, bytes of state and of parameters


def _update(
    sample: Sample,
    optimizer: OptimizerFactory | None,
    names: Mapping[int, str],
    gradients: list[torch.Tensor],
    clock: Clock,
) -> _Update:
    """The optimizers' steps on copies of a unit's parameters, each after work on all of a model's `gradients`: a step
    finds caches as a backward leaves them."""
    if optimizer is None or not sample.parameters:
        return 0.0, 0, 0
    called = [(names.get(id(own), f"parameter {number}"), own) for number, own in enumerate(sample.parameters)]
    made = optimizers_of_copies(optimizer, called, sample.stage.module, sample.inputs, where=f"unit {sample.unit.name}")
    marks = []
    for _ in range(1 + UPDATES):
        if gradients:
            torch._foreach_mul_(gradients, 1.0)
        begin = clock.stamp()
        for one in made:
            one.step()
        marks.append((begin, clock.stamp()))
    clock.settle()
    spans = [clock.between(*span) for span in marks[1:]]
    return fastest(spans), state_bytes(made), bytes_of(sample.parameters)


def state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    states = [state for one in optimizers for state in one.state.values()]
    return bytes_of(value for each in states for value in each.values() if isinstance(value, torch.Tensor))


def _profile(
    model: nn.Module,
    passes: Passes,
    workspaces: dict[int, int],
    updates: dict[int, _Update] | None,
    *,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Profile:
    seen: set[int] = set()
    nodes = []
    for sample in passes.samples:
        tensors = {id(t): t for t in (*sample.stage.module.parameters(), *sample.stage.module.buffers())}
        shared = [t for key, t in tensors.items() if key in seen and isinstance(t, nn.Parameter)]
        own = [t for key, t in tensors.items() if key not in seen or t.requires_grad]
        seen.update(tensors)
        nodes.append(_node(sample, passes, own=own, shared=shared, workspaces=workspaces, updates=updates))
    forward, backward = passes.step[Op.F], passes.step[Op.B]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    ratio = None
    if updates is not None:
        _, states, sizes = zip(*(updates[sample.like] for sample in passes.samples), strict=True)
        ratio = sum(states) / max(1, sum(sizes))
    return Profile(
        nodes=tuple(nodes),
        edges=_edges(passes),
        tied=_tied(passes),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=_dtype(model, passes, autocast),
        microbatch_size=int(passes.num_samples),
        optimizer_ratio=ratio,
        step_seconds=fastest(forward) + fastest(backward),
        step_spread=spread_of(both),
        slowdown=max(1.0, typical(both) / fastest(both)),
    )


def _node(
    sample: Sample,
    passes: Passes,
    *,
    own: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    workspaces: dict[int, int],
    updates: dict[int, _Update] | None,
) -> Node:
    times = passes.times[sample.like]
    first = passes.samples[sample.like]
    backward = fastest(times[Op.B])
    input_grad, weight_grad = 0.0, 0.0
    if split_forward := passes.split_forward[sample.like]:
        more = max(0.0, fastest(split_forward) - fastest(times[Op.F]))
        if times[Op.I]:
            input_grad, weight_grad = more + fastest(times[Op.I]), fastest(times[Op.W])
        else:
            input_grad, weight_grad = (0.0, more + backward) if first.parameters else (more + backward, 0.0)
    sizes = [bytes_of([t]) for t in own if isinstance(t, nn.Parameter)]
    less: dict[str, Any] = {}
    if sample.like in passes.saved:
        plain, longer = (fastest(seconds) for seconds in passes.beside[sample.like])
        less["keep_less_bytes"] = max(0, sample.stash_bytes - passes.saved[sample.like])
        less["keep_less_seconds"] = max(0.0, longer - plain)
    notes = [sample.unit.description]
    if sample.finish is not None:
        notes.append("with the loss")
    if shared:
        notes.append("some parameters are those of a unit before")
    if first is not sample:
        notes.append(f"timed as {first.unit.name}, its equal")
    return Node(
        name=sample.unit.name,
        description=", ".join(notes),
        forward_seconds=fastest(times[Op.F]),
        backward_seconds=backward,
        activation_bytes=sample.output_bytes,
        parameter_bytes=sum(sizes),
        largest_parameter_bytes=max(sizes, default=0),
        small_parameter_bytes=sum(size for size in sizes if size < ALONE_BYTES),
        buffer_bytes=bytes_of(t for t in own if not isinstance(t, nn.Parameter)),
        stash_bytes=sample.stash_bytes,
        spread=spread_of([f + b for f, b in zip(times[Op.F], times[Op.B], strict=True)]),
        input_grad_seconds=input_grad,
        weight_grad_seconds=weight_grad,
        update_seconds=0.0 if updates is None else updates[sample.like][0],
        workspace_bytes=workspaces[sample.like],
        runs_again=bool(sample.stage.units),  # calls between modules do not, by themselves
        **less,
    )


def _tied(passes: Passes) -> tuple[Tied, ...]:
    """Units that train the same parameters, and bytes: of those whose gradients travel alone, and of the small ones."""
    holders: dict[int, list[str]] = {}
    sizes: dict[int, int] = {}
    for sample in passes.samples:
        for parameter in sample.parameters:
            holders.setdefault(id(parameter), []).append(sample.unit.name)
            sizes[id(parameter)] = bytes_of([parameter])
    found: dict[tuple[tuple[str, ...], bool], int] = {}
    for key, names in holders.items():
        if len(names) > 1:
            group = tuple(names), sizes[key] < ALONE_BYTES
            found[group] = found.get(group, 0) + sizes[key]
    return tuple((names, float(shared)) for (names, _), shared in found.items())


def _edges(passes: Passes) -> tuple[tuple[str, str], ...]:
    names = [sample.unit.name for sample in passes.samples]
    edges = [
        (names[source.producer], names[i])
        for i, sample in enumerate(passes.samples)
        for source in sample.stage.inputs
        if source.producer != MODEL_INPUT
    ]
    # A unit that neither takes nor gives a tensor stays where it is.
    linked = {name for edge in edges for name in edge}
    edges += [
        (names[max(i - 1, 0)], names[max(i, 1)])
        for i, name in enumerate(names)
        if name not in linked and len(names) > 1
    ]
    return tuple(edges)


def _dtype(model: nn.Module, passes: Passes, autocast: torch.dtype | None) -> str:
    if autocast is not None:
        return f"autocast {str(autocast).removeprefix('torch.')}"
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    kinds += [x.dtype for x in passes.samples[0].inputs]
    return str(kinds[0]).removeprefix("torch.")
