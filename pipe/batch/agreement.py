"""Checks that all ranks have the same pipeline, programs and weights when it is built, and the same batch in each call.

Otherwise their messages would not match, or results would be meaningless: rank 0 computes with the inputs and the last
rank with the target. If a data loader shuffles differently on each rank, inputs are paired with the wrong targets, and
the labels are noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile, zip_longest
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import Collectives, Guard, MeshPlace
from ...comm.transport import memory_of
from ...partition.deferred.recipes import value_of
from ...partition.model.fingerprint import told_apart
from ...partition.model.recorded.words import digest
from ...partition.model.units import Step, Steps
from ...schedules import Schedule
from ..settings.options import Options

T = TypeVar("T")

# Elements of each tensor, evenly spread: enough to find another order or sample, at little cost.
_SAMPLED = 4096
UNKNOWN = -1.0  # of a rank that passes shapes alone

CALLS = ("train_step", "forward_backward", "eval_step", "predict", "verify")  # that take a batch
Call = Literal["train_step", "forward_backward", "eval_step", "predict", "verify"]

_ONE_PIPELINE = (
    "Ranks of one pipeline must pass the same batch, since the first computes with its inputs and the last with its "
    "targets; most often a DataLoader(shuffle=True) or a sampler draws another order on each rank."
)
_BUILDING = "building the stages"  # the same text at every step of it


def describe(schedule: Schedule, names: Sequence[str], **options: object) -> str:
    """Description of all that must be the same on every rank, in a line that can be compared by eye.

    >>> from ...schedules import build
    >>> describe(build("gpipe", num_ranks=1, num_microbatches=2), ["0 .. 3"], seed=0)
    "schedule 'gpipe' (order 9aaf733a), P=1, M=2, stages 0 .. 3, seed=0"
    """
    order = zlib.crc32("\n".join(" ".join(map(str, program)) for program in schedule.programs).encode())
    parts = [
        f"schedule {schedule.name!r} (order {order:08x})",
        f"P={schedule.num_ranks}",
        f"M={schedule.num_microbatches}{'' if schedule.num_slices == 1 else f', {schedule.num_slices} slices each'}",
        f"stages {'; '.join(names)}",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    return ", ".join(parts)


def made_of(schedule: Schedule, options: Options) -> dict[str, str]:
    """All that determines a run's numbers, by name: the same in a process that is started with the same script."""
    shown = {name: getattr(options, name) for name in ("seed", "max_grad_norm", "autocast", "compile")}
    described = describe(schedule, [*options.cut] if options.cut else ["as they come"], **shown)
    code = {"optimizer": options.user_code[-1], "loss_fn": options.loss_fn, "lr_scheduler": options.lr_scheduler}
    return {"set of options": described, **told_apart(options.root, code)}


def unequal_weights(root: nn.Module, schedule: Schedule, place: MeshPlace, collectives: Collectives) -> str | None:
    """Message that names the first parameter that differs between ranks; None: there is none. Collective. Each stage
    begins with the weights of its first replica's first process, so only these are compared; with a deferred model
    those of its tensor group, each member of which makes a part. Meta tensors differ from any others."""
    if collectives.alone:
        return None
    begin = dict.fromkeys(place.process_of(owners[0], tensor=0) for owners in schedule.owners)
    is_deferred = any(value_of(p) is not None for p in root.parameters())
    counts = is_deferred or collectives.rank in begin
    mine = {name: _checksum(p) for name, p in root.named_parameters()} if counts else {}
    everyone = collectives.gather((is_deferred, mine), what="comparing the weights that ranks begin with")
    if any(is_deferred for is_deferred, _ in everyone):
        begin |= dict.fromkeys(process for owners in schedule.owners for process in place.mesh.members(owners[0]))
    for name in everyone[next(iter(begin))][1]:
        known = {process: everyone[process][1].get(name, UNKNOWN) for process in begin}
        one = next(iter(known), -1)
        other = next((process for process, own in known.items() if own != known[one]), None)
        if other is not None:
            return (
                f"process {other} has made other weights than process {one}, first {name!r}, and each stage would "
                f"begin with those of its own process: expected torch.manual_seed(0) alike before the model is made, "
                f"or before the first batch load(folder), or build(*batch) and load_state_dict(state)"
            )
    return None


def _checksum(parameter: torch.Tensor) -> float:
    value = value_of(parameter)
    return checksum(parameter.detach()) if value is None else value.checksum()


def agreed(make: Callable[[], T], collectives: Collectives, guard: Guard, *, what: str) -> T:
    """Call `make`; where it fails on one rank, ValueError on all, and the run continues. Collective over all. `make`
    may gather as `_BUILDING`: a rank that failed before joins that gather with its error."""
    if collectives.alone:
        return make()
    made: list[T] = []
    failed: Exception | None = None
    story = ""
    try:
        made.append(make())
    except Exception as error:
        if guard.spares(error):
            raise
        failed, text = error, str(error)
        if not text or not isinstance(error, ValueError | RuntimeError):  # else the text is a sentence
            text = f"{type(error).__name__}: {text}"
        story = f"{what} failed on {collectives.name_of(collectives.rank)}: {text}"
    try:
        collectives.alike(None, what=_BUILDING, problem=story)
    except ValueError as error:
        raise error from failed
    return made[0]


def check_agreement(mine: str, collectives: Collectives, *, replica: tuple[int, str] = (0, "")) -> None:
    """ValueError on every rank unless all give the same description; the run continues. Collective over the processes.
    `replica`: its number, and what its ranks must have in common."""

    def differing(process: int, its: tuple[int, str, str], other: int, others: tuple[int, str, str]) -> str | None:
        if its[2] == others[2] and (its[0] != others[0] or its[1] == others[1]):
            return None
        one, another = map(collectives.name_of, (process, other))
        return (
            f"{one} has {its[2]}{its[1]}; {another} has {others[2]}{others[1]}: expected the same model, schedule, "
            f"options and batch sizes on every rank"
        )

    collectives.alike((*replica, mine), differing, what="comparing the pipelines of all ranks")


class SamePrograms:
    """Compares the programs of processes with the same `alike`, while a pipeline is built; its call is an `Agree`.
    Programs may differ as they are (`own`), but not in their canonical form."""

    def __init__(self, collectives: Collectives, guard: Guard, alike: str) -> None:
        self._collectives: Collectives | None = collectives
        self._guard = guard
        self.alike = alike
        self._differed: dict[bool, bool] = {}  # by `training`: whether own programs differed

    def __call__(self, own: Steps, canonical: Steps | None = None, *, training: bool = True) -> bool:
        together = self._collectives
        if together is None:
            return self._differed.get(training, False)
        steps = own()
        digests = digest(steps), digest(steps if canonical is None else canonical())
        given = together.alike((self.alike, *digests), what=_BUILDING)
        first = {alike: digests for alike, *digests in reversed(given)}
        self._differed[training] = self._differed.get(training, False) or any(
            its != first[alike][0] for alike, its, _ in given
        )
        if any(its != first[alike][1] for alike, _, its in given):
            everyone = together.alike((self.alike, steps), what=_BUILDING)
            raise self._guard.spared(ValueError(_first_difference(everyone, together)))
        return self._differed[training]

    def settled(self) -> None:
        self._collectives = None


def _first_difference(everyone: Sequence[tuple[str, Sequence[Step]]], collectives: Collectives) -> str:
    firsts: dict[str, tuple[int, Sequence[Step]]] = {}
    for process, (key, theirs) in enumerate(everyone):
        one, steps = firsts.setdefault(key, (process, theirs))
        pairs = enumerate(zip_longest(steps, theirs, fillvalue=Step("nothing more")))
        at, (mine, other) = next(((i, pair) for i, pair in pairs if pair[0].text != pair[1].text), (0, (None, None)))
        if mine is not None and other is not None:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(mine.text, other.text, strict=False))
            begin = max(60, sum(1 for _ in alike) - 40)  # after the name, before the difference
            texts = [
                f"{each.text[:60]}{'...' * (begin > 60)}{each.text[begin : begin + 120]}{each.line}"
                for each in (mine, other)
            ]
            return (
                f"{collectives.name_of(one)} and {collectives.name_of(process)} run different programs; the first "
                f"difference, at step {at}: {texts[0]} in the former, {texts[1]} in the latter. Expected a model that "
                f"does the same in every process. One that iterates over a set of strings does not, since these hash "
                f"differently in each: type sorted(...) around the set, or PYTHONHASHSEED=0 before the command. "
                f"Numbers that differ come from generators without a seed, from ranks or the environment"
            )
    raise AssertionError("no two programs differ")


class Identity(NamedTuple):
    """A call with a batch: which of CALLS, its number among the pipeline's; checksums of the batch's inputs and targets
    and of the stages' programs for it, UNKNOWN where they are not compared; and the size of the tensor group, since
    groups of other sizes run other programs."""

    call: float
    number: float
    inputs: float = UNKNOWN
    targets: float = UNKNOWN
    program: float = UNKNOWN
    group: float = UNKNOWN

    def refuse_other(self, other: Identity, *, step: int, name: str, its_name: str, why: str = _ONE_PIPELINE) -> None:
        """ValueError that names both processes, unless the other has made the same call with the same batch."""
        if self[:2] != other[:2]:
            mine, its = (f"{CALLS[int(one.call)]} (call {int(one.number)} with a batch)" for one in (self, other))
            raise ValueError(
                f"{name} is in {mine}, and {its_name} in {its}: expected the same calls, in the same order, on every "
                f"rank"
            )
        for what, one, its_one in zip(("inputs", "targets"), self[2:], other[2:], strict=False):
            if one != its_one and UNKNOWN not in (one, its_one):
                raise ValueError(
                    f"{name} passed other {what} to step {step} than {its_name}. {why} Expected "
                    f"pipe.loader(dataset, batch_size=...), or DataLoader(..., "
                    f"generator=torch.Generator().manual_seed(0)) alike on every rank"
                )
        are_known = UNKNOWN not in (self.program, other.program)
        if are_known and self.group == other.group and self.program != other.program:
            raise ValueError(
                f"{name} runs another forward in step {step} than {its_name}: expected the same flags among the "
                f"arguments, and a model whose attributes change alike on every rank, and whose code does the same "
                f"there (sorted(...) around sets)"
            )


def checksum(value: object) -> float:
    """A whole number of 32 bits over shapes, types and up to 4,096 elements of each tensor in `value`.

    UNKNOWN where a tensor is on the meta device. Of sparse and nested tensors only shapes and types count, and other
    objects not at all. On CUDA it synchronizes.

    >>> checksum((torch.arange(6), "name")) == checksum((torch.arange(6), "other"))
    True
    >>> checksum(torch.arange(6)) == checksum(torch.arange(6).flip(0))
    False
    """
    if is_shape_alone(value):
        return UNKNOWN
    number = 0
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        shape = "nested" if leaf.is_nested else tuple(leaf.shape)
        number = zlib.crc32(f"{shape} {leaf.dtype}{' wants a gradient' * leaf.requires_grad}".encode(), number)
        if leaf.is_nested or leaf.layout is not torch.strided:
            continue
        some = leaf.detach()
        if leaf.numel() > _SAMPLED:
            indices = _indices(leaf.numel()).to(leaf.device)
            some = some.view(-1)[indices] if leaf.is_contiguous() else some[torch.unravel_index(indices, leaf.shape)]
        some = torch.view_as_real(some.resolve_conj()) if some.is_complex() else some
        if some.numel():
            number = zlib.crc32(memory_of(some.contiguous()).view(torch.uint8).cpu().numpy().tobytes(), number)
    return float(number)


def is_shape_alone(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))


@lru_cache(maxsize=64)  # sequences may have any number of lengths
def _indices(size: int) -> torch.Tensor:
    """One element of each of 4,096 equal runs, at a different offset in each, so that not all are of one column."""
    run = size / _SAMPLED
    number = torch.arange(_SAMPLED, dtype=torch.float64)
    return ((number + (number * 0.6180339887498949) % 1.0) * run).to(torch.int64).clamp_(max=size - 1)
