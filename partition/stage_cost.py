"""Costs of a stage, for `partition()` and `plan()` alike: all formulas are in this file.

Seconds of a stage on its ranks, of one microbatch:

    F, B      its nodes' over the speed of its slowest device; in B of a recomputed stage, what runs again as well
    message   latency + bytes across the cut / T / bandwidth of the slowest link between ranks that share a microbatch
    sending   the bytes of the messages over both cuts, without latency, which delays a link and does not slow it down
    overhead  what the runtime takes around each F, B, I and W, and for which it is busy with the messages of an F, B or
              I, those in and those out; at any speed of the device, since it is the host's

and of one update:

    ring      gradients summed over the D replicas (`Topology.ring`), a sum for each bucket in which they travel;
              where the optimizer's state is divided, each rank gets the sums of its share alone (`Topology.exchange`);
              `gradient_ratio` bytes for a byte of weights
    step      the optimizer's step, a share of it where its state is divided
    gather    there another exchange after the step, with which the updated weights go round, `gather_ratio` bytes each;
              or before the forwards that need them, one stage ahead (`gathers_ahead`)
    busy      the busy share of both: for so long they keep their ranks from computing

A stage has two lanes, which overlap. Its pace is that of the slower one, a microbatch:

    work      (F + B + 2 overhead) share    share: of a batch's M microbatches that the busiest of D replicas runs
              + busy updates                updates: a microbatch, 1/M where a batch is one
    links     sending share             of its own card, and of one that devices share
              + (ring + gather) updates

`stage_seconds` is this table, elementwise: for stages on known ranks, and for all stages between any two cuts where
only some of that is known: the range of a stage's devices and not yet the ranks of its neighbours (`solve/dynamic.py`,
never slower there than here), or links without sums (`search/cuts.py`). What `StageDevices` leave out takes no time.

Recomputation of a stage, a microbatch:

                kept from F to B                        made again, at once         runs again, in B
    none        what every node keeps                   nothing                     nothing
    full        what crosses the cut before it          what all nodes keep         F of all nodes, before B
    layer       what enters each node, each tensor      what the node keeps that    F of each node, before its
                once                                    keeps most                  own B
    selective   results of matrix products, and what    the most that a node keeps  the rest of F of each node,
                enters each node                        beyond that                 before its own B
    keep_less   what every node keeps, but for          the most that a node keeps  what that takes of each node,
                results of its GELUs                    beyond that                 in its own B

Under the last three a node that does not run again (`Node.runs_again`) keeps what it always keeps. "layer:3" is "layer"
for the first 3 of the stage's nodes that run again, and "none" for the others; so are "selective:3", "keep_less:3".
"offload" is "none", whose activations wait on the host: the schedule says when they leave and come back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ..schedules.messages import BUCKET_BYTES
from ..schedules.timing.costs import Costs, Ties
from .topology import Floats, Indices, TransferTime

Figures = Any  # a number or an array of them; they broadcast
KEEP_LESS = "keep_less"
RECOMPUTE = ("none", "full", "layer", "selective", KEEP_LESS)
COUNTED = ("layer", "selective", KEEP_LESS)
OFFLOAD = "offload"
RULES = f"{', '.join(map(repr, RECOMPUTE))}, or a count such as 'layer:3' or 'selective:3'"


def count_again(rule: object, *, expected: str = RULES) -> int | None:
    """How many of a stage's units "layer:3" means; None for one of RECOMPUTE, ValueError for anything else.

    >>> count_again("layer:3"), count_again("layer")
    (3, None)
    """
    if rule in RECOMPUTE:
        return None
    counted = rf"(?:{'|'.join(COUNTED)}):([1-9][0-9]{{0,8}})"
    if not isinstance(rule, str) or (found := re.fullmatch(counted, rule)) is None:
        raise ValueError(f"recompute={rule!r}: expected one of {expected}")
    return int(found[1])


def kind_of(rule: str) -> str:
    """The rule without its count: "layer" of "layer:3"."""
    return rule.partition(":")[0]


class Rounds(NamedTuple):
    """How gradients and updated weights go round replicas, and who they are, as `Profile` says."""

    gradient_ratio: float = 1.0
    gather_ratio: float = 1.0
    gathers_ahead: bool = False
    sums_early: bool = False
    sums_whole: bool = False
    sums_by_chunk: bool = False
    context: int = 1
    expert: int = 1


class Recomputed(NamedTuple):
    """A row of the table of recomputation for stages, arrays of one shape: bytes kept, bytes made again, seconds."""

    kept: Floats
    again: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSums:
    """Sums over the nodes of stages, arrays of one shape."""

    forward: Floats  # F [s]
    backward: Floats  # B [s]
    update: Floats  # optimizer's step [s]
    weights: Floats  # [bytes]
    buffers: Floats  # [bytes]
    stash: Floats  # kept from F to B [bytes]
    before: Floats  # of tensors that cross the cut before the stage [bytes]
    after: Floats  # the same after it
    workspace: Floats  # of the node that needs most while it runs [bytes]
    largest: Floats  # of the largest parameter [bytes]
    small: Floats  # of all whose gradients travel in common buckets [bytes]
    # finds the rows of COUNTED in the table of recomputation; called where memory is short
    by_node: Callable[[str], Recomputed]
    # of one of several stages, [n + 1] the rows "none", "layer:1", .. "layer:n"; or those of others.
    by_count: Callable[[int, str], Recomputed] | None = None
    input_grad: Floats = field(default_factory=lambda: np.zeros(1))  # I, where it runs apart [s]
    weight_grad: Floats = field(default_factory=lambda: np.zeros(1))  # W
    # parameters whose gradients travel alone, those aside that stages on other ranks hold, too
    alone: Floats = field(default_factory=lambda: np.zeros(1))
    # tied, small_tied: of the weights, and of the small ones among them, those that stages on other ranks hold, too:
    # all holders together sum their gradients, apart from the stage's own sum [bytes]
    tied: Floats = field(default_factory=lambda: np.zeros(1))
    small_tied: Floats = field(default_factory=lambda: np.zeros(1))
    # of the weights, those that fewer replicas sum [bytes]
    experts: Floats = field(default_factory=lambda: np.zeros(1))
    forward_exchange: Floats = field(default_factory=lambda: np.zeros(1))  # of F, collectives within the stage [s]
    backward_exchange: Floats = field(default_factory=lambda: np.zeros(1))  # of B
    # of the host for each replica of which updated weights are gathered [s]
    parts: Floats = field(default_factory=lambda: np.zeros(1))
    rounds: Rounds = field(default_factory=Rounds)  # of the profile, of all stages
    _rows: dict[str, Recomputed] = field(default_factory=dict, init=False, repr=False)

    @property
    def work(self) -> Floats:
        return self.forward + self.backward

    @property
    def summed(self) -> Floats:
        """Weights whose gradients replicas of the stage alone sum [bytes]."""
        own = self.weights - self.tied - self.experts
        return np.asarray(np.where(own > 1e-9 * self.weights, own, 0.0), dtype=np.float64)

    def holders(self, shards: Figures, stages: Any = ...) -> Figures:
        """Ranks with a part of the optimizer's state where so many replicas divide it, on average of a stage's bytes:
        a context's members divide it, too, and that of an expert only the ranks that hold it."""
        own, experts = np.asarray(shards), 0.0
        own = np.where(own > 1, own * self.rounds.context, own)
        if self.rounds.expert > 1:
            experts = self.experts[stages] / np.maximum(self.weights[stages], 1e-30)
        return 1 / ((1 - experts) / own + experts / np.maximum(own / self.rounds.expert, 1)) if np.any(experts) else own

    def counts(self, stage: int, kind: str = "layer") -> Recomputed:
        """[n + 1] of one stage, of which none to all n nodes that run again do so, the first ones first."""
        if self.by_count is None:
            return Recomputed(*(each[stage : stage + 1] for each in self.under("none")))
        return self.by_count(stage, kind)

    def under(self, recompute: str) -> Recomputed:
        """[S] what is kept, made again and run again under one treatment of the module's table, cached."""
        if recompute not in self._rows:
            nothing = np.zeros_like(self.stash)
            match recompute:
                case "none" | "offload":
                    row = Recomputed(kept=self.stash, again=nothing, seconds=nothing)
                case _ if (number := count_again(recompute)) is not None:
                    kind = kind_of(recompute)
                    tables = [self.counts(stage, kind) for stage in range(len(self.stash))]
                    picked = [[float(column[min(number, len(column) - 1)]) for column in each] for each in tables]
                    row = Recomputed(*np.array(picked).T)
                case "full":
                    row = Recomputed(kept=self.before, again=self.stash, seconds=self.forward)
                case _:
                    row = self.by_node(recompute)
            self._rows[recompute] = row
        return self._rows[recompute]

    def seconds_again(self, recompute: Sequence[str]) -> Floats:
        """[S] seconds of what runs again in B, by stage."""
        found, names = np.zeros_like(self.forward), np.array(recompute)
        for name in set(recompute) - {"none"}:
            found = np.where(names == name, self.under(name).seconds, found)
        return found


def stages_from(parts: Sequence[StageSums]) -> StageSums:
    """[S] stage s as the s-th of these has it."""

    def chosen(columns: Iterable[Floats]) -> Floats:
        return np.array([float(column[stage]) for stage, column in enumerate(columns)])

    figures = [each.name for each in fields(StageSums) if each.type == "Floats"]
    columns: Any = {name: chosen(getattr(part, name) for part in parts) for name in figures}
    return replace(
        parts[0],
        **columns,
        by_node=lambda name: Recomputed(*map(chosen, zip(*(part.under(name) for part in parts), strict=True))),
        by_count=lambda stage, kind: parts[stage].counts(stage, kind),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevices:
    """Speeds of the devices and links that stages run on. Figures are arrays [S], one for each stage, or, to bound the
    cost of many stages, numbers or arrays that broadcast with those of `StageSums`. What is left out takes no time."""

    speed: Figures  # of the slowest device, times that of the profile's
    inward: Figures = 0.0  # seconds a byte of whole messages to the stage before
    outward: Figures = 0.0  # the same to the one after
    # 1 where messages inward, outward, and sums take a card that devices share, else 0; none: all are 0
    shared: tuple[Figures, ...] = ()
    message_overhead: Figures = 0.0  # seconds for which a rank is busy with empty messages of an F or a B
    message_bytes: tuple[Figures, ...] = (0.0, 0.0)  # the same for each of their bytes, inward and outward
    rings: Sequence[TransferTime] = ()  # over the replicas, of each stage
    exchanges: Sequence[TransferTime] = ()  # likewise
    expert_rings: Sequence[TransferTime] = ()  # over those with the same experts
    # where rings and exchanges are not known, a lower bound of theirs: both results of `least_rounds`, in seconds a
    # byte of weights
    rounds: tuple[Figures, Figures] = (0.0, 0.0)
    sum_busy: Figures = 0.0  # part of the sums' seconds for which their ranks can't compute (0 to 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds:
    """Seconds of stages, arrays that broadcast: of a microbatch (F, B, all that it sends over its own links, and over a
    card that devices share, 0 where it has none; I and W as `halves` under a schedule that has them), of the runtime
    around each action, and besides for the messages of an F or a B, of an update (sum of gradients, optimizer's step,
    updated weights gathered), seconds of that sum that may pass before the last backward ends (early); of F and B those
    of `exchanges` within the stage, which what runs again is not among; the share of those sums and gathers for which
    their ranks can't compute (0 to 1); whether they take that card, too (1); and whether weights are gathered before
    the next forwards, in place of after the step.

    `work` counts two actions a microbatch, where a schedule that splits the backward may have three.
    """

    forward: Floats
    backward: Floats
    sending: Floats
    sending_shared: Figures
    ring: Floats
    step: Floats
    gather: Floats
    sum_busy: Figures
    overhead: Floats
    message_overhead: Floats
    early: Floats | float = 0.0
    sums_shared: Figures = 0.0
    gathers_ahead: bool = False
    halves: tuple[Floats, Floats] | None = None
    exchanges: tuple[Figures, Figures] = (0.0, 0.0)

    @property
    def collectives(self) -> Floats:
        """Seconds of an update's sum of gradients and gather of weights, over the replicas."""
        return self.ring + self.gather

    @property
    def after(self) -> Floats:
        """Seconds of `collectives` between the last backward of a batch and its end."""
        return (self.ring if self.gathers_ahead else self.collectives) - np.minimum(self.early, self.ring)

    @property
    def busy_in_collectives(self) -> Floats:
        """Seconds of `collectives` during which ranks cannot compute."""
        return np.asarray(self.collectives * self.sum_busy)

    @property
    def work(self) -> Floats:
        """F + B, each with what the runtime takes around it."""
        whole = self.backward if self.halves is None else sum(self.halves)
        return np.asarray(self.forward + whole + runtime_seconds(self.overhead, self.message_overhead))

    def costs(self, *, around: float, norm: float | None, tied: Ties) -> Costs:
        return Costs(
            forward=self.forward.tolist(),
            backward=self.backward.tolist(),
            input_grad=None if self.halves is None else self.halves[0].tolist(),
            weight_grad=None if self.halves is None else self.halves[1].tolist(),
            **dict(zip(("forward_exchange", "backward_exchange"), map(_none_or_all, self.exchanges), strict=True)),
            update=self.step.tolist(),
            overhead=self.overhead.tolist(),
            message_overhead=self.message_overhead.tolist(),
            around=around,
            norm=norm,
            sum_busy=self.sum_busy,
            tied=tied,
        )


def _none_or_all(seconds: Figures) -> Any:
    return np.asarray(seconds).tolist() if np.any(seconds) else 0.0


def runtime_seconds(action: Figures, messages: Figures = 0.0) -> Figures:
    """Seconds of the runtime around F and B of a microbatch: of each action, and for its messages."""
    return 2 * (action + messages)


def message_seconds(overheads: Sequence[float]) -> tuple[float, ...]:
    """[S - 1] seconds for which either end is busy with a message between neighbouring stages, from the [S] of a
    stage's messages to both neighbours; 0 for a single stage.

    >>> message_seconds([10.0, 15.0, 5.0])
    (10.0, 5.0)
    """
    found = [overheads[0]]
    for each in overheads[1:-1]:
        found.append(max(0.0, each - found[-1]))
    return tuple(found)


def busiest_share(num_microbatches: int | None, replicas: Floats) -> Floats:
    """Part of a batch that the busiest of so many replicas runs; without a batch all have equal parts.

    >>> busiest_share(8, np.array([1, 3, 4])).tolist(), busiest_share(None, np.array([4])).tolist()
    ([1.0, 0.375, 0.25], [0.25])
    """
    if num_microbatches is None:
        return np.asarray(1 / replicas)
    return np.asarray(-(-num_microbatches // replicas) / num_microbatches)


def num_buckets(sums: StageSums) -> Indices:
    """Buckets in which gradients travel, at least 1: common ones of small parameters, and one for each large one; 1
    where parameters are not known, or chunks are buckets."""
    small = np.maximum(sums.small - sums.small_tied, 0.0)
    found = np.where(
        (sums.largest > 0) & (not sums.rounds.sums_by_chunk), sums.alone + np.ceil(small / BUCKET_BYTES), 1
    )
    return np.asarray(np.maximum(found, 1), dtype=np.intp)


def collective_seconds(
    sums: StageSums,
    links: Sequence[TransferTime],
    expert_rings: Sequence[TransferTime],
    *,
    ratio: float,
    as_one: bool = False,
) -> Floats:
    """[S] seconds of all that stages hold alone, `ratio` bytes for a byte of weights, once round their replicas in as
    many buckets as gradients have, or `as_one`: one after the other, as NCCL has them, or as many at once as the
    transport takes; and of their experts."""
    numbers = np.ones_like(sums.summed, dtype=np.intp) if as_one else num_buckets(sums)
    in_turn = {
        key: replace(link, at_once=link.at_once or 1) for key, link in {id(link): link for link in links}.items()
    }
    every = zip(links, sums.summed.tolist(), numbers.tolist(), strict=True)
    found = [in_turn[id(link)].seconds(ratio * own, number=number) if own > 0 else 0.0 for link, own, number in every]
    held = zip(expert_rings, sums.experts.tolist(), strict=False)  # there may be none
    return np.add(found, [ring.seconds(ratio * each) if each else 0.0 for ring, each in held] or 0.0)


def update_seconds(
    step: Floats, *, whole: Floats, parts: Floats, gather: Floats | float, shards: Figures
) -> tuple[Floats, Floats, Floats]:
    """Seconds of a sum of gradients, the optimizer's step, and a gather of weights, elementwise: `whole` and `step`
    alone, or, where `shards` ranks divide the optimizer's state, `parts` of the gradients, a share, and `gather`."""
    number = np.asarray(shards, dtype=np.float64)
    return np.where(number > 1, parts, whole), np.asarray(step / number), np.where(number > 1, gather, 0.0)


def least_rounds(whole: Figures, parts: Figures, gather: Figures, *, gathers_ahead: bool) -> tuple[Floats, Floats]:
    """Lower bounds of the collectives of an update, whether the optimizer's state is divided or not, elementwise: of
    those after the last backward, and of the rest. `whole`, `parts`, `gather`: as in `update_seconds`, in any unit."""
    both = np.minimum(whole, parts + gather)
    after = np.minimum(whole, parts) if gathers_ahead else both
    return after, np.maximum(both - after, 0.0)


def busy_with_messages(sums: StageSums, on: StageDevices) -> Floats:
    """Seconds for which a rank is busy with the messages of an F or a B."""
    inward, outward = on.message_bytes
    return np.asarray(on.message_overhead + sums.before * inward + sums.after * outward)


def work_seconds(sums: StageSums, on: StageDevices, *, again: Figures, action: float) -> Floats:
    """`StageSeconds.work` of what `stage_seconds` says of a schedule with whole backwards, alone."""
    forward, backward = sums.forward / on.speed, (sums.backward + again) / on.speed
    return np.asarray(forward + backward + runtime_seconds(action, busy_with_messages(sums, on)))


def stage_seconds(
    sums: StageSums,
    on: StageDevices,
    *,
    again: Figures = 0.0,
    shards: Figures = 1,
    action: float = 0.0,
    split_share: Floats | None = None,
) -> StageSeconds:
    """The table above, elementwise: for S stages whose ranks are known, and for all stages between any two cuts.

    Arguments:
        again: seconds of what runs again in B, on the profile's device.
        shards: replicas that divide the optimizer's state.
        action: seconds of the runtime around each action, messages apart.
        split_share: part of the microbatches whose I and W run apart; None: the schedule has none.
    """
    halves, shards = None, sums.holders(shards)
    if split_share is not None:  # both walk the same graph, and take no less than B; what runs again does so before I
        both = sums.input_grad + sums.weight_grad
        longer = sums.backward + split_share * np.maximum(both - sums.backward, 0.0)
        weight = longer * sums.weight_grad / np.maximum(both, 1e-30)
        halves = (np.maximum(longer - weight, 0.0) + again) / on.speed, weight / on.speed  # sums round
    backward = (sums.backward + again) / on.speed
    there, back = sums.after * on.outward, sums.before * on.inward
    sent, shared = back + there, back * on.shared[0] + there * on.shared[1] if on.shared else 0.0
    step, messages = sums.update / on.speed, busy_with_messages(sums, on)
    rounds, early = sums.rounds, np.zeros(1)
    if on.rings:
        ratios = rounds.gradient_ratio, rounds.gradient_ratio, rounds.gather_ratio
        links = on.rings, on.rings if rounds.sums_whole else on.exchanges, on.exchanges
        divided = np.asarray(shards) > 1
        is_used = not divided.all(), divided.any(), divided.any()
        whole, parts, gather = (
            collective_seconds(sums, own, on.expert_rings, ratio=ratio, as_one=as_one) if used else np.zeros_like(step)
            for own, ratio, as_one, used in zip(links, ratios, (False, *[rounds.sums_whole] * 2), is_used, strict=True)
        )
        gather = gather + sums.parts * shards
        ring, step, gather = update_seconds(step, whole=whole, parts=parts, gather=gather, shards=shards)
        if rounds.sums_early:
            last = backward if halves is None else halves[1]
            hidden = np.minimum(ring, last) * (1 - 1 / num_buckets(sums))
            at_the_end = divided & rounds.sums_whole | (np.asarray(on.sum_busy) > 0)
            early = np.where(at_the_end, 0.0, hidden)
    else:
        summed, step = sums.summed, step / shards
        ring, gather = (summed * each for each in on.rounds)
        early = ring if rounds.sums_early else early  # at most
    return StageSeconds(
        halves=halves,
        forward=sums.forward / on.speed,
        backward=backward,
        early=early,
        exchanges=(sums.forward_exchange / on.speed, sums.backward_exchange / on.speed),
        sending=sent - shared if on.shared else sent,
        sending_shared=shared,
        sums_shared=on.shared[2] if on.shared else 0.0,
        ring=ring,
        step=step,
        gather=gather,
        gathers_ahead=rounds.gathers_ahead,
        sum_busy=on.sum_busy,
        overhead=np.full_like(messages, action),
        message_overhead=messages,
    )
