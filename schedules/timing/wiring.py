"""The wiring of a schedule: the dependencies and transfers of its actions in dense numbers, without a clock.

    action       (code, index): code = number of its op * S + stage
    slot         holds an arrival time; an action begins when the slots of its code at its index are filled
    route        from rank to rank, for messages of one size: the link and the channels that they occupy
    channel      one direction of a link or card, which carries one thing at a time
    joint step   a collective of several ranks, ready when the last of them begins it, which fills slots when it ends;
                 also an offload or reload of activations, with one rank

The simulator (`simulate`) and the page in which costs can be varied (`viz/explorer/replay.js`) both play it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..collectives import place_collectives
from ..dependencies import Dependencies, Wire
from ..ir import BACKWARD_OPS, MOVE_OPS, Collective, Op, Schedule, ScheduleError
from ..messages import receives_ahead
from ..versions import derive_versions
from .costs import CostTable
from .links import AllReduce, Link, Links, wire_bytes

LANE_OPS = (Op.F, Op.B, Op.I, Op.W, Op.U)
_FREE = Link()


class MessageRoute(NamedTuple):
    """The route of messages of one size from rank `sender` to rank `receiver`.

    Messages take the latency of the sending `stage` in addition to that of the link `way`; `channels` are numbers.
    """

    sender: int
    receiver: int
    stage: int
    num_bytes: float
    way: Link
    channels: tuple[int, ...]


class Output(NamedTuple):
    """Result of an action for another rank: index k fills slot base + k."""

    base: int
    wire: Wire
    routes: tuple[int | None, ...]  # number of the route by index; None: it stays on the rank
    last: tuple[int, ...] | None  # by index, the code of the last action that contributes; None: only one does


class JointStep(NamedTuple):
    """A sum of gradients (REDUCE_GRAD) or a gather of weights (UNSHARD), once per update group; or activations of a
    stage that move to the host (OFFLOAD) or back (RELOAD), once per microbatch."""

    stages: tuple[int, ...]
    op: Op
    ranks: tuple[int, ...]
    seconds: float  # duration once its channels are free [s]
    channels: tuple[int, ...]
    fills: Mapping[int, Sequence[int]]  # slots, by update group or microbatch
    # base of slots; it begins once the slot of its update group or microbatch is filled; None: at once
    after: int | None = None
    early: float = 0.0  # by how much its channels may be taken before that [s]


class ScheduleWiring:
    """The wiring of one schedule, over links if there are any.

    Attributes:
        actions: by rank, those of its compute lane.
        programs: by rank, their codes and indices.
        inputs: by code, the bases of the slots that an action waits for.
        outputs: by code.
        routes, joint_steps: by number.
        begins: by rank and position in `actions`, the (joint step, update group or microbatch) begun before that
            position.
        gather_after_update: by stage, the joint step that a rank begins after an update of the epilogue.
        filled: slots that are filled from the start.
        num_slots, num_channels: their numbers.
        waits: by slot, the pair of ranks, for messages that wait for their receive to be posted.
        waits_also: by rank and position, as `inputs` of the forward there, those of the backward that begins with it.
        posts: by rank and position (of those in `begins`), the pairs for which it posts a receive.
        later: slots, of activations that leave once their sender has the gradient that it takes next.
        links: over which it is wired.

    Raises ValueError for links and costs that do not fit the schedule, ScheduleError for an action without a cost.
    """

    def __init__(self, schedule: Schedule, table: CostTable, links: Links | None) -> None:
        self.schedule = schedule
        self.num_stages = schedule.num_stages
        self.num_indices = schedule.total_indices
        self.inputs: list[list[int]] = [[] for _ in range(len(LANE_OPS) * self.num_stages)]
        self.outputs: list[list[Output]] = [[] for _ in self.inputs]
        self.routes: list[MessageRoute] = []
        self.joint_steps: list[JointStep] = []
        self.actions = schedule.compute_programs
        self.begins: list[dict[int, list[tuple[int, int]]]] = [{} for _ in schedule.programs]
        self.gather_after_update: dict[int, int] = {}
        self.filled: list[int] = []
        self.num_slots = 0
        self._channels: dict[Hashable, int] = {}
        self.links = links
        self.programs = self._encode()
        needs = Dependencies(schedule)
        self._lay_wires(needs)
        self.waits: dict[int, tuple[int, int]] = {}
        self.later: set[int] = set()
        self.posts: list[dict[int, list[tuple[int, int]]]] = [{} for _ in schedule.programs]
        together = schedule.together
        self.waits_also: list[dict[int, list[int]]] = [
            {
                at: [base + then.index - action.index for base in self.inputs[self.code(then.op, then.stage)]]
                for at, action in enumerate(program)
                if (then := together.get(action)) is not None
            }
            for program in self.actions
        ]
        self._post_receives()
        self._arrange_joint_steps(table)
        if needs.moves:
            self._arrange_moves(needs.moves, table)

    @property
    def num_channels(self) -> int:
        return len(self._channels)

    def code(self, op: Op, stage: int) -> int:
        return LANE_OPS.index(op) * self.num_stages + stage

    def _encode(self) -> list[tuple[list[int], list[int]]]:
        code_of = {(op.value, s): self.code(op, s) for op in LANE_OPS for s in range(self.num_stages)}
        encoded = []
        for rank, program in enumerate(self.actions):
            try:
                encoded.append(([code_of[op, stage] for stage, op, _ in program], [k for _, _, k in program]))
            except KeyError as error:
                op, stage = error.args[0]
                raise ScheduleError(
                    f"rank {rank} runs {op} of stage {stage}, which has no cost: expected F B I W U of the stages "
                    f"0..{self.num_stages - 1}"
                ) from None
        return encoded

    def _slots(self, number: int) -> int:
        base = self.num_slots
        self.num_slots += number
        return base

    def _number(self, names: Sequence[Hashable]) -> tuple[int, ...]:
        return tuple(self._channels.setdefault(name, len(self._channels)) for name in names)

    # --- messages ---

    def _lay_wires(self, needs: Dependencies) -> None:
        """Gives slots to each wire that crosses ranks. Within a rank program order suffices."""
        owners = self.schedule.owners
        sizes = {} if self.links is None else wire_bytes(self.schedule, self.links, needs.wires)
        for wire in needs.wires:
            if owners[wire.src] == owners[wire.dst]:
                continue
            base = self._slots(self.num_indices)
            output = Output(base, wire, self._routes_of(wire, sizes.get(wire, 0.0)), self._last(wire, needs))
            for op in wire.ops:
                for stage in wire.users:
                    self.inputs[self.code(op, stage)].append(base)
                for stage in wire.makers:
                    self.outputs[self.code(op, stage)].append(output)

    def _routes_of(self, wire: Wire, num_bytes: float) -> tuple[int | None, ...]:
        owner, times = self.schedule.owner, self.links and self.links.index_factors
        if len(self.schedule.owners[wire.src]) == len(self.schedule.owners[wire.dst]) == 1 and not times:
            return (self._add_route(owner(wire.src, 0), owner(wire.dst, 0), wire.src, num_bytes),) * self.num_indices
        between: dict[tuple[int, int, float], int | None] = {}
        sizes = [num_bytes * each for each in times or (1.0,)]
        ways = [(owner(wire.src, k), owner(wire.dst, k), sizes[k % len(sizes)]) for k in range(self.num_indices)]
        for src, dst, size in ways:
            if (src, dst, size) not in between:
                between[src, dst, size] = None if src == dst else self._add_route(src, dst, wire.src, size)
        return tuple(between[way] for way in ways)

    def _add_route(self, src: int, dst: int, stage: int, num_bytes: float) -> int:
        way = _FREE if self.links is None else self.links.way(src, dst)
        channels = () if self.links is None else self._number(self.links.channels(src, dst, way))
        self.routes.append(MessageRoute(src, dst, stage, num_bytes, way, channels))
        return len(self.routes) - 1

    def _last(self, wire: Wire, needs: Dependencies) -> tuple[int, ...] | None:
        if len(wire.makers) == 1:
            return None
        makers = [needs.maker(wire.message(k)) for k in range(self.num_indices)]
        return tuple(self.code(op, stage) for stage, op, _ in makers)

    def _post_receives(self) -> None:
        """Posts receives at the positions where `lower` does, for links that would idle without one (see `links`); and
        finds what is sent later."""
        ahead = receives_ahead(max((each.num_bytes for each in self.routes), default=0.0))
        meets = [each.way.meets and each.num_bytes > 2 * each.way.buffer for each in self.routes]
        slow = [
            waits or (0 < (ahead - 2) * size * way.seconds_per_byte < 2 * way.latency and not way.blocks)
            for waits, (*_, size, way, _) in zip(meets, self.routes, strict=True)
        ]
        meet = {each[:2] for each, waits in zip(self.routes, meets, strict=True) if waits}  # posted just before needed
        sent: dict[tuple[int, int], list[int]] = {}  # slots, in the order of the sender
        made, used = dict[int, tuple[int, int]](), dict[int, tuple[int, int]]()  # by slot, rank and position
        first: dict[int, list[int]] = {}  # slots of what the sender takes next
        is_needed = any(each.way.meets for each in self.routes) or (any(slow) and ahead < self.num_indices * len(slow))
        for rank, (codes, indices) in enumerate(self.programs if is_needed else ()):
            for at, (code, k) in enumerate(zip(codes, indices, strict=True)):
                for base in (*self.inputs[code], *self.waits_also[rank].get(at, ())):
                    used.setdefault(base + k, (rank, at))
                for base, _, routes, last in self.outputs[code]:
                    if (p := routes[k]) is not None and (last is None or last[k] == code):
                        made[base + k] = rank, at
                        if slow[p]:
                            self.waits[base + k] = self.routes[p][:2]
                            sent.setdefault(self.waits[base + k], []).append(base + k)
                        if self.routes[p].way.meets and code < self.num_stages:  # an activation
                            first[base + k] = self._next_gradients(rank, at)
        for pair, slots in sent.items():
            late = [used.get(slot, (0, len(self.actions[pair[1]])))[1] for slot in reversed(slots)]
            early = sorted(late) if pair in meet else [0] * ahead + [at + 1 for at in sorted(late)]
            for place in map(min, reversed([*accumulate(late, min)]), early):
                self.posts[pair[1]].setdefault(place, []).append(pair)
                self.begins[pair[1]].setdefault(place, [])
        for slot, taken in first.items():
            if (end := used.get(slot)) and taken and all((end[0], -1) < made.get(each, end) < end for each in taken):
                self.later.add(slot)

    def _next_gradients(self, rank: int, at: int) -> list[int]:
        """Slots of what a rank's next action takes from others, where that is a backward."""
        found = self.actions[rank][at + 1 : at + 2]
        codes = [(self.code(op, stage), k) for stage, op, k in found if op in BACKWARD_OPS]
        return [base + k for code, k in codes for base in self.inputs[code]]

    # --- collectives ---

    def _arrange_joint_steps(self, table: CostTable) -> None:
        schedule = self.schedule
        sums: Sequence[AllReduce] = () if self.links is None else self.links.sums
        for each in sums:
            if not 0 <= each.stage < self.num_stages:
                last = self.num_stages - 1
                raise ValueError(f"an all-reduce of stage {each.stage}: expected a stage from 0 to {last}")
        if not schedule.has_backward:
            return
        gathers = [each for each in sums if each.gather > 0]
        self._arrange_sums(_sums_by_costs(schedule, table), {(each.stage,): each for each in sums})
        self._arrange_gathers(gathers)
        groups = range(self._num_groups)
        sums_of = [each.stages for each in self.joint_steps if each.op is Op.REDUCE_GRAD]
        wanted = [Collective(stages, Op.REDUCE_GRAD, g) for stages in sums_of for g in groups]
        wanted += [Collective((each.stage,), Op.UNSHARD, 0) for each in gathers if each.unshards]
        numbers = {(each.stages, each.op): number for number, each in enumerate(self.joint_steps)}
        for rank, placed in enumerate(place_collectives(schedule, wanted)):
            for position, (stages, op, group) in placed:
                lane = self._on_lane(rank, position)
                self.begins[rank].setdefault(lane, []).append((numbers[stages, op], group))
        for begins, program in zip(self.begins, self.actions, strict=True):
            for at, (stage, op, group) in enumerate(program):
                if op is Op.U and stage in self.gather_after_update:
                    begins.setdefault(at + 1, []).append((self.gather_after_update[stage], group))

    @property
    def _num_groups(self) -> int:
        return max(1, self.schedule.num_batches * self.schedule.groups_per_batch)

    def _arrange_sums(self, by_costs: dict[tuple[int, ...], float], by_links: dict[tuple[int, ...], AllReduce]) -> None:
        """Sums that updates wait for; where links give the seconds of a stage's sum, these replace those in the
        costs."""
        for stages, seconds in (by_costs | {stages: each.seconds for stages, each in by_links.items()}).items():
            linked = by_links.get(stages)
            ranks = Collective(stages, Op.REDUCE_GRAD, 0).ranks(self.schedule.owners)
            base = self._slots(self._num_groups)
            if not self.schedule.has_epilogue:
                self.inputs[self.code(Op.U, stages[0])].append(base)
            self.joint_steps.append(
                JointStep(
                    stages=stages,
                    op=Op.REDUCE_GRAD,
                    ranks=ranks,
                    seconds=seconds,
                    # Without links each rank has one lane for all its sums.
                    channels=self._number([("lane", rank) for rank in ranks])
                    if linked is None
                    else self._around(linked),
                    fills={group: (base + group,) for group in range(self._num_groups)},
                    early=0.0 if linked is None else linked.early,
                )
            )

    def _arrange_gathers(self, gathers: Sequence[AllReduce]) -> None:
        """Weights gathered before the batch, or after each update: forwards that use that version wait for it."""
        schedule = self.schedule
        used = derive_versions(schedule).used if gathers and not schedule.has_epilogue else {}
        for each in gathers:
            fills: dict[int, Sequence[int]] = {}
            if each.unshards:
                if schedule.is_asynchronous:
                    raise ValueError(
                        f"weights of stage {each.stage} that are gathered for a batch under the asynchronous schedule "
                        f"{schedule.name!r}: expected AllReduce(..., unshards=False)"
                    )
                base = self._gathered(each.stage)
                fills = {0: range(base, self.num_slots)}
            else:
                self.gather_after_update[each.stage] = len(self.joint_steps)
                if not schedule.has_epilogue:
                    base = self._gathered(each.stage)
                    versions = [used[each.stage, k] for k in range(self.num_indices)]
                    self.filled += [base + k for k, version in enumerate(versions) if version == 0]
                    for k, version in enumerate(versions):
                        if version:
                            fills[version - 1] = [*fills.get(version - 1, ()), base + k]
            self.joint_steps.append(
                JointStep(
                    stages=(each.stage,),
                    op=Op.UNSHARD,
                    ranks=tuple(dict.fromkeys(schedule.owners[each.stage])),
                    seconds=each.gather,
                    channels=self._around(each),
                    fills=fills,
                )
            )

    def _gathered(self, stage: int) -> int:
        base = self._slots(self.num_indices)
        self.inputs[self.code(Op.F, stage)].append(base)
        return base

    # --- activations that move ---

    def _on_lane(self, rank: int, position: int) -> int:
        """The position in the compute lane that corresponds to a position in the program."""
        program = self.schedule.programs[rank]
        if len(program) == len(self.actions[rank]):
            return position
        return sum(action.op not in MOVE_OPS for action in program[:position])

    def _arrange_moves(self, moves: Mapping[tuple[int, int], int], table: CostTable) -> None:
        """One pair of joint steps per stage and rank whose activations move; backwards of activations that stay find
        their slots filled."""
        slots: dict[int, tuple[int, int]] = {}  # by stage: bases for offloads and for reloads
        for stage in sorted({stage for stage, _ in moves}):
            slots[stage] = self._slots(self.num_indices), self._slots(self.num_indices)
            back = slots[stage][1]
            self.filled += [back + k for k in range(self.num_indices) if (stage, k) not in moves]
            for op in BACKWARD_OPS:
                self.inputs[self.code(op, stage)].append(back)
        numbers: dict[tuple[int, int], int] = {}  # of the offload; the reload is the next
        for (stage, _), rank in moves.items():
            if (stage, rank) not in numbers:
                numbers[stage, rank] = len(self.joint_steps)
                self.joint_steps += self._to_host(stage, rank, slots[stage], table)
        for rank, program in enumerate(self.schedule.programs):
            lane = 0
            for stage, op, k in program:
                if op in MOVE_OPS:
                    number = numbers[stage, rank] + (op is Op.RELOAD)
                    self.begins[rank].setdefault(lane, []).append((number, k))
                else:
                    lane += 1

    def _to_host(self, stage: int, rank: int, slots: tuple[int, int], table: CostTable) -> list[JointStep]:
        there, home = (self._number([(direction, rank)]) for direction in ("to host", "from host"))
        fills = [{k: (base + k,) for k in range(self.num_indices)} for base in slots]
        return [
            JointStep((stage,), Op.OFFLOAD, (rank,), table.offload[stage], there, fills[0]),
            JointStep((stage,), Op.RELOAD, (rank,), table.reload[stage], home, fills[1], after=slots[0]),
        ]

    def _around(self, each: AllReduce) -> tuple[int, ...]:
        assert self.links is not None
        return self._number(self.links.channels_of_sum(each, self.schedule.owners[each.stage]))


def _sums_by_costs(schedule: Schedule, table: CostTable) -> dict[tuple[int, ...], float]:
    """Seconds of sums over replicas and over stages that share weights."""
    sums: dict[tuple[int, ...], float] = {
        (s,): seconds for s, seconds in enumerate(table.reduce_grad) if schedule.trains(s)
    }
    if schedule.has_epilogue:
        sums.update(table.tied)
    owners = schedule.owners
    several = {stages for stages in sums if len({rank for stage in stages for rank in owners[stage]}) > 1}
    # A sum that takes no time changes nothing in one batch, where updates come last. In several batches an update waits
    # for the gradients of all replicas, and later forwards for the update; where updates may wait, the program that
    # runs has them later (`defer_updates`), when such sums are complete.
    waits = schedule.is_asynchronous and not schedule.rule.updates_may_wait
    return {stages: seconds for stages, seconds in sums.items() if (seconds > 0 or waits) and stages in several}
