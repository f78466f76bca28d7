"""The intermediate representation of a schedule: which rank computes what, in which order.

A schedule is data. The same object is checked, simulated, executed and drawn:

    rank 0 | 0F0 0F1 .   0B0 0F2 0B1 .   0B2    Action = (stage, op, index), prints as 0F2
    rank 1 | .   1F0 1B0 1F1 1B1 1F2 1B2 .      a program = the ordered actions of one rank

Symbols: P ranks, V chunks per rank, S = P*V stages, M microbatches of a batch. The `index` of a compute action is the
global microbatch t*M + k (batch t), that of an update its update group. Where microbatches are cut into n slices along
the sequence, it counts slices: k*n + q is slice q of microbatch k.
"""

# ruff: noqa: PLC0414 (names under their own are given out)

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .actions import BACKWARD_OPS as BACKWARD_OPS
from .actions import COMPUTE_OPS as COMPUTE_OPS
from .actions import LAST_USES as LAST_USES
from .actions import MOVE_OPS as MOVE_OPS
from .actions import Action as Action
from .actions import Collective as Collective
from .actions import Op as Op
from .actions import Relation as Relation
from .actions import ScheduleError as ScheduleError
from .needs import Edge as Edge
from .needs import Needs, check_edges, read_edges
from .needs import chain as chain
from .overlap import pairs_in, read_pairs, refuse_apart
from .placement import ascending_owners, read_owners, read_placed
from .text import (
    JSON_VERSION,
    csv_of,
    grid_of,
    read_csv,
    read_data,
    read_json,
    read_overlapped,
    read_programs,
    refuse_undeclared_owners,
    unit_time_cells,
)
from .weight_rules import RULES, WeightRule
from .wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A program for each rank, with the placement of the stages.

    Invariant (proved by `check`, not here): each stage's forward and backward of each microbatch occur exactly once, on
    the rank that owns them, in an order without a deadlock.

    Arguments:
        name: of the family, for people.
        placement: [P] tuples: the stages of each rank. A stage may be on several ranks (replicas).
        owners: [S] tuples: the ranks of each stage in round-robin order: microbatch k of a batch belongs to
            `owners[s][k % len(owners[s])]`, with all its slices. A rank may occur several times. Ascending by default.
        programs: [P] tuples of actions, each in the order in which its rank runs them.
        num_microbatches: M, of one batch.
        num_slices: n, of one microbatch along the sequence: slice q of microbatch k has the index k*n + q. A slice
            attends to earlier ones, so a stage runs F in ascending and backwards in descending order.
        num_batches: batches in the program; 1 for every flush schedule.
        weight_rule: which weight version a forward uses ("flush": that of its batch), see `weight_rules`.
        update_every: microbatches of one update group, after which each stage updates (U); M by default.
        edges: the stage graph; a chain by default. Skip connections add edges.
        without_backward: stages that only run forwards, under no gradient, and are not updated: earlier passes of a
            model whose blocks run several times. No gradient travels over their edges.
        overlapped: forwards that run together with the backward of another stage directly after them, see `overlap`.

    Raises ScheduleError when the parts do not fit together.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    programs: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    num_slices: int = 1
    num_batches: int = 1
    weight_rule: str = "flush"
    update_every: int | None = None
    edges: tuple[Edge, ...] | None = None
    owners: tuple[tuple[int, ...], ...] = ()
    without_backward: tuple[int, ...] = ()
    overlapped: tuple[Action, ...] = ()

    def __repr__(self) -> str:
        parts = [count(len(self.placement), "rank"), count(len(self.owners), "stage")]
        parts += [count(self.num_microbatches, "microbatch")]
        parts += [f"{self.num_slices} slices each"] if self.num_slices > 1 else []
        parts += [count(self.num_batches, "batch")] if self.num_batches > 1 else []
        return f"<Schedule {self.name}: {', '.join(parts)}>"

    def __post_init__(self) -> None:
        object.__setattr__(self, "programs", read_programs(self.programs))
        object.__setattr__(self, "placement", read_placed(self.placement))
        if not self.placement or len(self.placement) != len(self.programs):
            raise ScheduleError(
                f"{len(self.placement)} ranks are placed and {len(self.programs)} have a program: "
                f"expected one program per rank, and at least one rank"
            )
        if self.num_microbatches < 1 or self.num_batches < 1:
            raise ScheduleError(
                f"num_microbatches={self.num_microbatches}, num_batches={self.num_batches}: expected at least 1 of each"
            )
        if self.update_every is not None and (self.update_every < 1 or self.num_microbatches % self.update_every):
            raise ScheduleError(
                f"update_every={self.update_every} for {self.num_microbatches} microbatches per batch: expected a "
                f"number that divides {self.num_microbatches}"
            )
        if not self.name.isprintable():
            raise ScheduleError(f"name={self.name!r}: expected printable text in one line")
        if self.weight_rule not in RULES:
            raise ScheduleError(
                f"weight_rule={self.weight_rule!r} of schedule {self.name!r}: expected one of {', '.join(RULES)}"
            )
        if self.num_slices < 1:
            raise ScheduleError(f"num_slices={self.num_slices}: expected at least 1")
        if self.num_slices > 1 and (self.num_batches > 1 or self.rule.is_asynchronous):
            raise ScheduleError(
                f"num_slices={self.num_slices} for {count(self.num_batches, 'batch')} under the rule "
                f"{self.weight_rule!r}: expected one batch under a rule that flushes, or num_slices=1"
            )
        object.__setattr__(self, "owners", read_owners(self.owners, ascending_owners(self.placement)))
        if self.edges is None:
            object.__setattr__(self, "edges", chain(self.num_stages))
        object.__setattr__(self, "edges", read_edges(self.stage_edges))
        check_edges(self.stage_edges, self.num_stages)
        if self.without_backward:
            self._read_without_backward()
        if self.overlapped:
            object.__setattr__(self, "overlapped", read_pairs(self.overlapped))
            refuse_apart(self.overlapped, self.together)
            if not self.has_epilogue or self.num_slices > 1 or self.moves_activations:
                raise ScheduleError(
                    f"overlapped={self.overlapped!r:.60} of schedule {self.name!r}, which does not flush, has slices "
                    f"or moves activations: expected one batch of whole microbatches that flushes"
                )

    def _read_without_backward(self) -> None:
        stages = tuple(sorted(set(self.without_backward)))
        last = self.num_stages - 1
        if not all(isinstance(stage, int) and 0 <= stage < last for stage in stages):
            raise ScheduleError(
                f"without_backward={self.without_backward!r:.60} of {count(self.num_stages, 'stage')}: expected stages "
                f"below {last}, which makes the loss"
            )
        if self.num_batches > 1 or self.rule.is_asynchronous:
            raise ScheduleError(
                f"without_backward={stages} for {count(self.num_batches, 'batch')} under the rule "
                f"{self.weight_rule!r}: expected one batch under a rule that flushes"
            )
        object.__setattr__(self, "without_backward", stages)
        edges = tuple(
            e if self.trains(e.src) and self.trains(e.dst) else e._replace(grad=False) for e in self.stage_edges
        )
        object.__setattr__(self, "edges", edges)

    @property
    def num_ranks(self) -> int:
        """P, or R when stages are replicated."""
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.owners)

    @property
    def stage_edges(self) -> tuple[Edge, ...]:
        """The stage graph (never None)."""
        assert self.edges is not None
        return self.edges

    @property
    def batch_indices(self) -> int:
        """Indices of one batch: its microbatches, or the slices of all of them."""
        return self.num_microbatches * self.num_slices

    @property
    def total_indices(self) -> int:
        """Indices of all batches of the program."""
        return self.batch_indices * self.num_batches

    @property
    def group_size(self) -> int:
        """Indices of one update group, whose gradients are summed before each stage updates."""
        return self.batch_indices if self.update_every is None else self.update_every * self.num_slices

    @property
    def groups_per_batch(self) -> int:
        """Updates of each stage in one batch."""
        return self.batch_indices // self.group_size

    @property
    def rule(self) -> WeightRule:
        """The record of its weight rule."""
        return RULES[self.weight_rule]

    @property
    def is_asynchronous(self) -> bool:
        """Whether batches overlap: the engine runs batch after batch without a flush."""
        return self.rule.is_asynchronous and self.has_backward

    @property
    def has_backward(self) -> bool:
        """False for a forward-only (evaluation) program."""
        return any(op in COMPUTE_OPS and op is not Op.F for program in self.programs for _, op, _ in program)

    @property
    def moves_activations(self) -> bool:
        """Whether activations are offloaded."""
        return any(op in MOVE_OPS for program in self.programs for _, op, _ in program)

    @property
    def compute_programs(self) -> tuple[tuple[Action, ...], ...]:
        """The programs without moves: the compute lane of each rank."""
        if not self.moves_activations:
            return self.programs
        return tuple(tuple(action for action in program if action.op not in MOVE_OPS) for program in self.programs)

    @property
    def together(self) -> dict[Action, Action]:
        """By forward of `overlapped`, the backward that begins together with it."""
        return pairs_in(self.programs, self.overlapped) if self.overlapped else {}

    @property
    def split_stages(self) -> frozenset[int]:
        """Stages of which some backwards come in two halves, I and W."""
        return frozenset(stage for program in self.programs for stage, op, _ in program if op is Op.I)

    @property
    def has_epilogue(self) -> bool:
        """Whether the optimizer steps follow the program (one batch, flushed) instead of being part of it."""
        return self.num_batches == 1 and self.has_backward and not self.rule.is_asynchronous

    def trains(self, stage: int) -> bool:
        """Whether a stage has backwards, and is updated."""
        return stage not in self.without_backward

    def owner(self, stage: int, index: int) -> int:
        """The rank that runs `index` of `stage`: all slices of a microbatch on the same one."""
        ranks = self.owners[stage]
        return ranks[0] if len(ranks) == 1 else ranks[index % self.batch_indices // self.num_slices % len(ranks)]

    def with_edges(self, edges: Sequence[Edge]) -> Schedule:
        """The same programs over another stage graph (skip connections)."""
        return replace(self, edges=tuple(edges))

    def forward_only(self, *, num_microbatches: int | None = None) -> Schedule:
        """The forwards of one batch in the same order, microbatches whole: the program of an evaluation.

        Arguments:
            num_microbatches: of a smaller batch; M by default.
        """
        batch = self.num_microbatches if num_microbatches is None else num_microbatches
        n = self.num_slices  # a microbatch takes the place of its first slice
        firsts = [[a for a in p if a.op is Op.F and a.index < batch * n and a.index % n == 0] for p in self.programs]
        programs = tuple(tuple(a if n == 1 else a._replace(index=a.index // n) for a in own) for own in firsts)
        return replace(
            self,
            programs=programs,
            num_microbatches=batch,
            num_slices=1,
            num_batches=1,
            weight_rule="flush",
            update_every=None,
            without_backward=(),
            overlapped=(),
        )

    def unit_time_cells(self) -> list[list[Action | None]]:
        """[P][T]: the action of each rank in each unit of time when every compute action takes one; None: idle.

        Updates take no time and are left out. Raises ScheduleError for a schedule that deadlocks.
        """
        needs = Needs(self.programs, self.stage_edges, num_slices=self.num_slices, together=self.together)
        sums = self._summed_gradients()

        def from_other_ranks(action: Action) -> list[Action]:
            rank = self.owner(action.stage, action.index)
            return [a for a in needs.of(action) if self.owner(a.stage, a.index) != rank] + sums.get(action, [])

        return unit_time_cells(self.compute_programs, from_other_ranks)

    def _summed_gradients(self) -> dict[Action, list[Action]]:
        """The last uses of replicated stages that each update waits for, where updates may not be delayed."""
        if not self.is_asynchronous or self.rule.updates_may_wait:
            return {}
        sums: dict[Action, list[Action]] = {}
        for action in (action for program in self.programs for action in program if action.op in LAST_USES):
            if len(self.owners[action.stage]) > 1:
                sums.setdefault(Op.U(action.stage, action.index // self.group_size), []).append(action)
        return sums

    def to_csv(self, *, overlap: Literal["none", "pairs"] = "none") -> str:
        """torch.distributed.pipelining's table: a row per rank, a column per unit of time, empty where idle.

        Arguments:
            overlap: "pairs": a forward directly followed by the backward of another stage becomes one cell that torch
                may run at once, `(0F3;3B1)OVERLAP_F_B`, as in its DualPipeV; "none": a cell for each.

        The stage graph is not part of the table. Raises ScheduleError for a schedule that the table cannot express
        (replicas, slices, several batches, updates, moves).
        """
        if overlap not in ("none", "pairs"):
            raise ValueError(f"overlap={overlap!r}: expected 'none' or 'pairs'")
        actions = [action for program in self.programs for action in program]
        if move := next((action for action in actions if action.op in MOVE_OPS), None):
            raise ScheduleError(
                f"schedule {self.name!r} moves activations ({move}, ...), which a CSV table cannot say: use to_json"
            )
        if self.without_backward:
            raise ScheduleError(
                f"schedule {self.name!r} has stages without a backward, {self.without_backward}, which a CSV table "
                f"cannot say; use to_json"
            )
        several = max(self.num_batches, self.num_slices, *map(len, self.owners)) > 1
        if several or self.weight_rule != "flush" or any(action.op is Op.U for action in actions):
            raise ScheduleError(
                f"schedule {self.name!r} has replicas, slices, several batches or updates, which a CSV table cannot "
                f"say: expected a flush schedule with one owner a stage; use to_json"
            )
        return csv_of(self.unit_time_cells(), pairs=overlap == "pairs", overlapped=self.overlapped)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        name: str = "csv",
        owners: Sequence[Sequence[int]] = (),
        overlap: Literal["none", "pairs"] = "none",
    ) -> Schedule:
        """Read `to_csv`'s form, or torch's; idle cells and communication are ignored (lowering inserts its own).

        Arguments:
            owners: as in a Schedule, since the table has none.
            overlap: "pairs": the parts of a cell such as `(0F3;3B1)OVERLAP_F_B` run together, see `overlap`; "none":
                they are consecutive actions.

        Raises ScheduleError that names row and column (from 1) of a cell that is not an action, and the row of a stage
        that other rows have as well, if neither the given owners nor ascending ones fit.
        """
        if overlap not in ("none", "pairs"):
            raise ValueError(f"overlap={overlap!r}: expected 'none' or 'pairs'")
        rows = read_csv(text)
        programs = tuple(rows.values())
        schedule = cls(
            name=name,
            placement=tuple(tuple(sorted({a.stage for a in actions})) for actions in programs),
            programs=programs,
            num_microbatches=1 + max(a.index for actions in programs for a in actions),
            owners=tuple(map(tuple, owners)),
            overlapped=read_overlapped(text) if overlap == "pairs" else (),
        )
        fitting = fitting_owners(schedule)
        if not owners and fitting != schedule.owners:
            refuse_undeclared_owners(rows, fitting)
        return schedule

    def to_data(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "version": JSON_VERSION,
            "name": self.name,
            "num_microbatches": int(self.num_microbatches),  # numpy's
            "num_slices": int(self.num_slices),
            "num_batches": int(self.num_batches),
            "weight_rule": self.weight_rule,
            "update_every": None if self.update_every is None else int(self.update_every),
            "placement": [list(map(int, stages)) for stages in self.placement],
            "owners": [list(map(int, ranks)) for ranks in self.owners],
            "without_backward": list(self.without_backward),
            "edges": [[int(e.src), int(e.dst), e.grad] for e in self.stage_edges],
            "programs": [" ".join(map(str, program)) for program in self.programs],
            **({"overlapped": [str(action) for action in self.overlapped]} if self.overlapped else {}),
        }

    @classmethod
    def from_data(cls, data: object) -> Schedule:
        """Read `to_data`'s form; ScheduleError says which key is wrong."""
        return cls(**read_data(data))

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(self.to_data(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read `to_json`'s form; ScheduleError says which key is wrong."""
        return cls.from_data(read_json(text))

    def grid(self) -> str:
        """The order as an aligned text grid, a row per rank, a column per unit of time.

        The stage is printed before the op only where some rank has several. A rank that begins moves of activations has
        a second row, with the moves that begin before the action above: >3 is an offload, <3 a reload.
        """
        several = any(len(stages) > 1 for stages in self.placement)
        return grid_of(self.unit_time_cells(), self.programs, several=several)


def fitting_owners(schedule: Schedule) -> tuple[tuple[int, ...], ...] | None:
    """The owners under which each forward is on the rank that owns it; None if no order of the ranks fits."""
    M, n = schedule.num_microbatches, schedule.num_slices
    forwards = [(a.stage, a.index, rank) for rank, p in enumerate(schedule.programs) for a in p if a.op is Op.F]
    runs_on = {(stage, index // n): rank for stage, index, rank in forwards}
    found = []
    for stage, ranks in enumerate(schedule.owners):
        first = [runs_on[stage, k] for k in range(min(len(ranks), M)) if (stage, k) in runs_on]
        owners = (*first, *(rank for rank in ranks if rank not in first))
        if sorted(owners) != sorted(ranks):
            return None
        found.append(owners)
    fits = all(found[s][(index // n % M) % len(found[s])] == rank for s, index, rank in forwards)
    return tuple(found) if fits else None
