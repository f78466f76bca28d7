"""All ranks must have built the same pipeline: otherwise their messages would not fit, or never come."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import takewhile, zip_longest
from typing import TypeVar

import torch
from torch import nn

from ...comm import Collectives, Guard, MeshPlace
from ...partition.deferred.recipes import value_of
from ...partition.model.fingerprint import told_apart
from ...partition.model.recorded.words import digest
from ...partition.model.units import Step, Steps
from ...schedules import Schedule
from ..settings.options import Options
from .batches import Batch
from .checksum import UNKNOWN, Identity, checksum

T = TypeVar("T")


def describe(schedule: Schedule, names: Sequence[str], **options: object) -> str:
    """Description of all that must be the same on every rank, in a line that people can compare.

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
    """All that decides on a run's numbers, by name: the same in a process that is started with the same script."""
    told = {name: getattr(options, name) for name in ("seed", "max_grad_norm", "autocast", "compile")}
    such = describe(schedule, [*options.cut] if options.cut else ["as they come"], **told)
    code = {"optimizer": options.user_code[-1], "loss_fn": options.loss_fn, "lr_scheduler": options.lr_scheduler}
    return {"set of options": such, **told_apart(options.root, code)}


def unequal_weights(root: nn.Module, schedule: Schedule, place: MeshPlace, collectives: Collectives) -> str | None:
    """In words, the first parameter that ranks of a pipeline have made otherwise; None: there is none. Collective.

    Each stage begins with the weights of its first replica's first process, so that only these count. Of a deferred
    model its tensor group does: each member makes its own part. Weights of the meta device differ from any others.
    """
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
    """Call `make`; where it fails on one rank, ValueError on all, and the run goes on. Collective over all.

    Within, `make` may gather what all give by `gathered`: a rank that fails before answers there.
    """
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
        failed, story = error, f"{what} failed on {collectives.name_of(collectives.rank)}: {_told(error)}"
    gathered(None, collectives, guard, story=story, failed=failed)
    return made[0]


def gathered(
    mine: T, collectives: Collectives, guard: Guard, *, story: str = "", failed: Exception | None = None
) -> list[T]:
    """Gather from every process; ValueError on all where one says that it has failed.

    Arguments:
        story: of what failed here, if so.
    """
    everyone = collectives.gather((story, mine), what="building the stages")  # whatever each of them has come to
    first = next((its for its, _ in everyone if its), None)
    if first is not None:
        raise guard.spared(ValueError(first)) from failed
    return [given for _, given in everyone]


def _told(error: Exception) -> str:
    """An error in a sentence about it: with its kind, unless its text was written to be read alone."""
    text = str(error)
    return text if text and isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {text}"


def check_agreement(mine: str, collectives: Collectives, guard: Guard, *, replica: tuple[int, str] = (0, "")) -> None:
    """ValueError on every rank unless all give the same description; the run goes on. Collective over the processes.

    Arguments:
        replica: its number, and what the ranks of that one must have in common.
    """
    gathered = collectives.gather((*replica, mine), what="comparing the pipelines of all ranks")
    for other, (number, common, its) in enumerate(gathered):
        if its != mine or (number == replica[0] and common != replica[1]):
            one, another = collectives.name_of(other), collectives.name_of(collectives.rank)
            raise guard.spared(
                ValueError(
                    f"{one} has {its}{common}; {another} has {mine}{replica[1]}: expected the same model, schedule, "
                    f"options and batch sizes on every rank"
                )
            )


class SamePrograms:
    """Compares what all processes are to run; see `Agree`. `alike`: processes that give the same here are compared; it
    may change."""

    def __init__(self, collectives: Collectives, guard: Guard, alike: str) -> None:
        self._collectives: Collectives | None = collectives
        self._guard = guard
        self.alike = alike
        self._differed: dict[bool, bool] = {}  # by mode: training or evaluation

    def __call__(self, own: Steps, canonical: Steps | None = None, *, training: bool = True) -> bool:
        """See Agree."""
        together = self._collectives
        if together is None:
            return self._differed.get(training, False)
        steps = own()
        digests = digest(steps), digest(steps if canonical is None else canonical())
        given = gathered((self.alike, *digests), together, self._guard)
        first = {alike: digests for alike, *digests in reversed(given)}
        self._differed[training] = self._differed.get(training, False) or any(
            its != first[alike][0] for alike, its, _ in given
        )
        if any(its != first[alike][1] for alike, _, its in given):
            everyone = gathered((self.alike, steps), together, self._guard)
            raise self._guard.spared(ValueError(_first_difference(everyone, together)))
        return self._differed[training]

    def settled(self) -> None:
        """All is built: from now on nobody is asked."""
        self._collectives = None


def _first_difference(everyone: Sequence[tuple[str, Sequence[Step]]], collectives: Collectives) -> str:
    firsts: dict[str, tuple[int, Sequence[Step]]] = {}
    for process, (key, theirs) in enumerate(everyone):
        one, steps = firsts.setdefault(key, (process, theirs))
        pairs = enumerate(zip_longest(steps, theirs, fillvalue=Step("nothing more")))
        at, (mine, other) = next(((i, pair) for i, pair in pairs if pair[0].text != pair[1].text), (0, (None, None)))
        if mine is not None and other is not None:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(mine.text, other.text, strict=False))
            begin = max(60, sum(1 for _ in alike) - 40)  # behind the name, in front of the difference
            texts = [
                f"{each.text[:60]}{'...' * (begin > 60)}{each.text[begin : begin + 120]}{each.line}"
                for each in (mine, other)
            ]
            return (
                f"{collectives.name_of(one)} and {collectives.name_of(process)} run different programs; the first "
                f"difference, at step {at}: {texts[0]} in the former, {texts[1]} in the latter. Expected a model that "
                f"does the same in every process. One that goes through a set of strings does not, since these hash "
                f"otherwise in each: type sorted(...) around the set, or PYTHONHASHSEED=0 in front of the command. "
                f"Numbers that differ come from generators without a seed, from ranks or the environment"
            )
    raise AssertionError("no two programs differ")


def check_same_batch(batch: Batch, collectives: Collectives, *, device: torch.device) -> None:
    """ValueError on every member of a tensor group unless all are in the same call with the same batch; on every
    process, where it is the pipeline's first one. Collective over the group, then over all processes.

    The others are compared where losses arrive: ranks of the last stage, which wait for nobody, learn of it later.
    """
    members, step = collectives.tensor_members, batch.step
    if len(members) > 1:
        own = torch.tensor(batch.identity, dtype=torch.float64, device=device)
        gathered = collectives.tensor_gather(own, what="comparing batches")
        first, *others = (Identity(*one.tolist()) for one in gathered)
        names = [collectives.name_of(member) for member in members]
        for name, theirs in zip(names[1:], others, strict=True):
            theirs.refuse_other(first, step=step, name=name, its_name=names[0], why=_ONE_RANK)
    if batch.identity.number == 1:
        given = collectives.gather((batch.replica[0], batch.identity), what="comparing the first batch")
        named = [(collectives.name_of(process), *one) for process, one in enumerate(given)]
        last = {key: (name, its) for name, replica, its in named for key in (replica, (replica, its.program % 1))}
        for name, replica, its in named if batch.has_target else ():
            for its_name, other in (last[replica], last[replica, its.program % 1]):
                its.refuse_other(other, step=step, name=name, its_name=its_name)


_ONE_RANK = "The members of a tensor group run one rank together."
