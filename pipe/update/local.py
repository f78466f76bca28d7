"""Local SGD: each replica updates independently, and after every H-th step their weights are averaged.

    replica 0   F B U   F B U   F B U + average   F B U   ...        H = 3
    replica 1   F B U   F B U   F B U + average   F B U   ...

Only losses are sent in between: a result is that of all samples, and one that is not finite stops all. The arithmetic
is that of torch's PeriodicModelAverager, over groups with time-outs (local SGD: arXiv 1805.09767). "adaptive" follows
SkewScout (arXiv 1910.00189): weights are evaluated on a microbatch of a neighbour, and H weighs the loss there against
bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ...comm.buckets import BucketSum
from ...schedules import Collective
from ..batch.agreement import checksum
from ..batch.batches import Batch, NonFiniteLossError
from ..results import EvalResult, Known
from ..settings.given import Given, check_batch
from ..shards.shard import ADAPTIVE
from .flush import FlushPrograms, FlushUpdate, shared_sums
from .interface import Programs
from .shared_sums import SharedSum

FIRST, MOST = 8, 64  # steps between two averagings under "adaptive"
_LOOK_AGAIN = 8  # steps to the next evaluation on a neighbour's data, after one that kept H, or set H = 1
_TOLERANCE = 0.2  # of the gap, which has noise; beyond, twice the loss costs as much as the bytes of each step


class Averaging(NamedTuple):
    """State of averaging weights over replicas.

    every: H now. times: averagings so far. sent_bytes: by this process for these, as in a ring, and for evaluations on
    a neighbour's data. gap: how much higher the loss of weights was on a neighbour's data, as a share; None before it
    is known.
    """

    every: int
    times: int = 0
    sent_bytes: int = 0
    gap: float | None = None


def next_interval(every: int, gap: float) -> int:
    """The next H: half, equal or twice the present one, with the least cost: the gap, assumed to grow with the H - 1
    steps without averaging, plus the bytes sent, a share of 1 / H.

    >>> next_interval(8, 0.0), next_interval(8, 0.5), next_interval(64, 0.0), next_interval(1, 0.0)
    (16, 4, 64, 2)
    """

    def cost(other: int) -> float:
        grown = 0.0 if other == 1 else gap * (other - 1) / (every - 1) if every > 1 else gap
        return max(0.0, grown - _TOLERANCE) + 1 / other

    return min((max(1, every // 2), every, min(2 * every, MOST)), key=cost)


class LocalUpdate(FlushUpdate):
    """Updates each replica independently, and averages weights over the data group every H-th step. Within `verify`,
    which needs equal weights, gradients are summed over all replicas."""

    def __init__(self, programs: FlushPrograms, *made_of: Any) -> None:
        super().__init__(programs, *made_of)
        run, ownership = self.run, self.ownership
        sync, collectives, (replica, count) = run.options.mesh.sync, run.collectives, run.layout.place.replica
        (rank,) = run.layout.place.local_ranks
        self.averaging = Averaging(FIRST if sync == ADAPTIVE else int(sync))
        self._adapts = sync == ADAPTIVE
        self._row = programs.data_groups[rank]
        pipelines = [range(q, programs.schedule.num_ranks, count) for q in range(count)]
        self._pipeline = pipelines[replica]
        self._everywhere = {each: (each.sums, each.replicas) for each in self.ranks.values()}
        self._within: dict[Collective, Sequence[SharedSum]] = {}
        groups: list[Sequence[int]] = [*pipelines]
        for collective in programs.sharing.collectives:
            ranks = collective.ranks(programs.schedule.owners)
            some = [[each for each in ranks if each in pipeline] for pipeline in pipelines]
            groups += some
            mine = some[replica] if rank in ranks else ()
            self._within[collective] = shared_sums(ownership, self.shards, collective, mine) if len(mine) > 1 else ()
        for group in groups:
            if len(group) > 1:
                collectives.subgroup(group)
        counted = ownership.counted_parameters([rank], among=self._pipeline)
        self._counted = [p for p in counted if p.requires_grad]
        self._is_apart = True  # whether replicas update independently
        self._differs = False  # whether their weights may differ
        self._next: int | None = None  # step after which they are averaged
        self._look_from = 0  # first step of the next evaluation on a neighbour's data
        if collectives.rank == 0:
            _warn_of_batch_norm(ownership.model.root)

    def begin(self, batch: Batch) -> Programs:
        for rank, everywhere in self._everywhere.items():
            rank.sums, rank.replicas = (self._within, ()) if self._is_apart else everywhere
        return super().begin(batch)

    def losses_known(self) -> None:
        super().losses_known()
        if self._is_apart:
            _, self.scale = next(iter(self.ranks.values())).total(0, among=self._pipeline)

    def step(self) -> Known:
        known = super().step()
        self._differs = True
        if self._is_due(known.step):
            self._average()
            self._next = known.step + 1 + self.averaging.every
        return known

    def drain(self) -> Programs | None:
        programs = super().drain()
        with self.run.guard.together():
            self._average()
        return programs

    def unite(self) -> None:
        """Average the optimizers' state, too, since a checkpoint has that of one replica: then a run continues from it
        as the saving one does. Numbers such as a step count must be equal."""
        run = self.run
        pairs = [(one, optimizer) for one in self.stages for optimizer in one.optimizers]
        states: dict[tuple[str, str], torch.Tensor] = {}
        for name, state in ((one.names.get(id(p), ""), s) for one, each in pairs for p, s in each.state.items()):
            states |= {(name, key): x for key, x in sorted(state.items()) if isinstance(x, torch.Tensor)}
        rest = {name: checksum(x) for name, x in states.items() if not (x.dim() and x.is_floating_point())}

        def differing(_: int, one: tuple[object, ...], __: int, other: tuple[object, ...]) -> str | None:
            if one[:2] != other[:2] or one == other:
                return None
            return (
                f"the optimizers of ranks {one[0]} hold state of other parameters (only some ranks had gradients), "
                f"and a checkpoint has one for all: expected sync=1, or a model of which every batch uses all"
            )

        mine = tuple(self._row), run.layout.place.tensor[0], sorted(states), rest
        run.collectives.alike(mine, differing, what="comparing the optimizers of replicas")
        self.gate.enter()
        self._mean([(name[0], states[name]) for name in sorted(states) if name not in rest])

    def refuse_users_gradients(self, what: str, *, instead: str) -> None:
        if self._is_apart:
            raise ValueError(f"{what} under sync=, where no gradients are summed: expected {instead}")

    def refuse_reading(self, what: str) -> None:
        if self._differs:
            raise ValueError(f"{what} between two averagings of sync=: expected flush() before, or full_state_dict()")

    @property
    def kept(self) -> dict[str, Any]:
        adapted = {"averaging": [self.averaging.every, self._next, self._look_from]} if self._adapts else {}
        return super().kept | adapted

    def go_on(self, kept: Mapping[str, Any]) -> None:
        super().go_on(kept)
        if "averaging" in kept:
            every, self._next, self._look_from = kept["averaging"]
            self.averaging = self.averaging._replace(every=every)

    def set_aside(self) -> Callable[[], None]:
        self._is_apart = False  # until `restart`: gradients are summed over all replicas
        return lambda: None

    def restart(self) -> None:
        super().restart()
        self._is_apart, self._differs, self._next = True, False, None

    def look_at_neighbour(
        self, evaluate: Callable[[Given], EvalResult], given: Given, step: int, reads_nothing: bool
    ) -> None:
        """Before the last step of an interval, choose the next H, if an evaluation on a neighbour's data is due.
        Collective over the processes; a process that `reads_nothing` needs shapes only."""
        if not self._adapts or not self._is_due(step) or step < self._look_from:
            return
        gap, every = 0.0, self.averaging.every
        if every > 1:
            num_microbatches = self.schedule.num_microbatches // len(self._row)
            with self.run.guard.together():  # for an error with one replica's batch
                check_batch(given, num_microbatches)
                own = given.detached().cut(num_microbatches)[0]
            theirs = self._neighbours(own, shapes_alone=reads_nothing)
            try:
                home, abroad = (loss for each in (own.copied(), theirs) if (loss := evaluate(each).loss) is not None)
                gap = (abroad - home) / max(abs(home), 1e-30)
            except NonFiniteLossError:  # on every rank alike
                gap = math.inf
        following = next_interval(every, gap)
        self._look_from = step + _LOOK_AGAIN if following in (1, every) else step
        self.averaging = self.averaging._replace(every=following, gap=gap if every > 1 else self.averaging.gap)

    def _is_due(self, step: int) -> bool:
        if self._next is None:
            self._next = (step // self.averaging.every + 1) * self.averaging.every
        return step + 1 >= self._next

    def _neighbours(self, own: Given, *, shapes_alone: bool) -> Given:
        run = self.run
        leaves, spec = pytree.tree_flatten((own.arguments.tensors, own.target))
        there = {i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and not x.is_meta}
        moved = [x.to("meta" if shapes_alone else "cpu") if i in there else x for i, x in enumerate(leaves)]
        with run.guard.together():
            everyone = run.collectives.gather(moved, what="looking at other replicas' data", ranks=self._row)
        self._sent(0 if shapes_alone else sum(leaves[i].nbytes for i in there) * (len(self._row) - 1))
        tensors, target = pytree.tree_unflatten(everyone[run.layout.place.replica[0] - 1], spec)
        return replace(own, arguments=replace(own.arguments, tensors=tensors), target=target)

    def _average(self) -> None:
        if self._differs:
            self.gate.enter()
            self._mean([(name, p.data) for name, p in self._named.items()])
            self._differs = False
            self.averaging = self.averaging._replace(times=self.averaging.times + 1)

    def _mean(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Mean of a tensor of each parameter, in place, over all that hold the parameter: two sums of a tied one, in
        different orders, might differ. Collective over the processes."""
        by_holders: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for name, tensor in named:
            by_holders.setdefault(self.ownership.holders(name), []).append(tensor)
        begun = []
        for ranks, tensors in by_holders.items():
            mean = BucketSum(tensors, self.run.collectives, what="averaging weights", ranks=ranks)
            for at, bucket in enumerate(mean.buckets):
                mean.leave(at, [tensors[i] / len(ranks) for i in bucket])
            begun.append((tensors, mean))
            self._sent(2 * (len(ranks) - 1) * mean.num_bytes // len(ranks))
        for tensors, mean in begun:
            torch._foreach_copy_(tensors, mean.wait())

    def _sent(self, num_bytes: int) -> None:
        self.averaging = self.averaging._replace(sent_bytes=self.averaging.sent_bytes + num_bytes)

    def _sum_norm(self, part: torch.Tensor, *, largest: bool) -> None:
        collectives = self.run.collectives
        collectives.tensor_sum(part, what="summing the gradient norm")
        if len(self._pipeline) > 1:
            collectives.begin_all_reduce(part, what="summing the gradient norm", ranks=self._pipeline)()


def _warn_of_batch_norm(root: nn.Module) -> None:
    found = next((name for name, one in root.named_modules() if isinstance(one, _BatchNorm)), None)
    if found is not None:
        warnings.warn(
            f"{found!r} is a BatchNorm under sync=: where replicas' data differ, so do the statistics that they train "
            f"with, which averaged weights do not fit, and a checkpoint has the first replica's. Expected GroupNorm",
            stacklevel=2,
        )
