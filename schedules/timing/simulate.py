"""The simulator: runs a schedule on given costs and links, and returns when everything happens.

Event-driven: the only events are the ends of actions. When an action ends at time t on rank r, its messages
leave (arriving latency later; with links, when those have carried them), whoever stands blocked on them starts, and r
starts its next action as soon as its inputs have arrived. A rank runs its program in order, so an action's start is the
maximum of when its lane became free and when its last input arrived. Events come in the order of time, of equal ones
the lowest rank's first: so links serve whatever is ready first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter

from ..collectives import place_collectives
from ..ir import Action, Collective, Op, Schedule, ScheduleError
from ..messages import Message
from ..needs import Needs, Wire
from ..versions import derive_versions
from .costs import Costs, CostTable
from .links import Channel, Links, Route, Sum, Traffic, wire_bytes
from .timeline import RankTrace, Span, Timeline

_OPS = (Op.F, Op.B, Op.I, Op.W, Op.U)
_NOT_YET = -1.0
# Slot base; by microbatch, the latency, and the route where there are links.
_Output = tuple[int, list[float], list[Route | None] | None]


def simulate(schedule: Schedule, costs: Costs, links: Links | None = None) -> Timeline:
    """When each action of `schedule` runs under `costs`.

    With `costs.update`, `costs.norm` or sums in `links`, a flush schedule ends with each rank's optimizer steps (its
    epilogue): behind the rank's own last backward and the sums of the stage's gradients, or with `costs.norm` when all
    ranks and sums are through and the global norm is known. Where ranks update parts of weights, it ends when these are
    gathered.

    Arguments:
        costs: of one stage action each [s].
        links: what carries the messages, and sums of gradients; None: messages take the latency in `costs` and never
            queue. A latency in `costs` comes on top of that of links. A stage of which links have no sum takes
            `costs.reduce_grad` for one, if it has replicas; those of tied weights are in `costs` alone.

    Raises ValueError for costs that do not fit the stages and links that do not fit the schedule, ScheduleError for a
    schedule in which a rank waits for ever. It takes the schedule for complete and each program for sound in itself:
    `check` proves that, and says why where it is not. O(actions * log P).
    """
    if not isinstance(links, Links | None):
        raise ValueError(f"links={links!r:.60}: expected Links(...), or None for messages that take the costs' latency")
    return _Simulation(schedule, costs.table(num_stages=schedule.num_stages), links).run()


def ideal_makespan(schedule: Schedule, costs: Costs) -> float:
    """The largest own work of any rank [s]: what a rank without any idle time would take."""
    table = costs.table(num_stages=schedule.num_stages)
    return max(sum(table.of(a.op, a.stage) for a in program) for program in schedule.programs)


class _StageSum:
    """The sums of the gradients of one stage, or of weights that several share: when ranks begin them, and when each is
    through.

    Slot of update group g and the owner in place q of R: base + g * R + q, where that owner's update looks.
    """

    def __init__(self, owners: Sequence[int], route: Route, *, base: int) -> None:
        self.route, self.base = route, base
        self.owners = owners
        self.begun: dict[int, dict[int, float]] = {}  # update group -> rank -> when it began [s]
        self.through: dict[int, float] = {}  # update group -> when all ranks have it [s]

    def begin(self, group: int, rank: int, now: float, arrived: list[float], blocked: dict[int, int]) -> list[int]:
        """A rank begins the sum of a group; returns the ranks that stood blocked on it, if it was the last to begin."""
        begun = self.begun.setdefault(group, {})
        begun[rank] = now
        if len(begun) < len(self.owners):
            return []
        self.through[group] = self.route.carry(now)
        slots = range(self.base + group * len(self.owners), self.base + (group + 1) * len(self.owners))
        for slot in slots:
            arrived[slot] = self.through[group]
        return [blocked.pop(slot) for slot in slots if slot in blocked]


class _StageGather:
    """Weights of one stage that are gathered from the parts of its ranks, behind each update or ahead of the batch.

    Slot of microbatch k: base + k, where its forward looks.

    Arguments:
        users: by update group (ahead of the batch: 0), the microbatches whose forwards use what is gathered.
    """

    def __init__(self, schedule: Schedule, stage: int, route: Route, *, base: int, users: dict[int, list[int]]) -> None:
        self.route, self.base, self.users = route, base, users
        self.num_owners = len(schedule.owners[stage])
        self.begun: dict[int, dict[int, float]] = {}  # update group -> rank -> when it began [s]
        self.through: dict[int, float] = {}

    def begin(self, group: int, rank: int, now: float, arrived: list[float], blocked: dict[int, int]) -> list[int]:
        """A rank begins; returns the ranks that stood blocked, if it was the last to begin."""
        begun = self.begun.setdefault(group, {})
        begun[rank] = now
        if len(begun) < self.num_owners:
            return []
        self.through[group] = self.route.carry(now)
        slots = [self.base + k for k in self.users.get(group, ())]
        for slot in slots:
            arrived[slot] = self.through[group]
        return [blocked.pop(slot) for slot in slots if slot in blocked]


class _Simulation:
    """Dense arrays for one run: an action is (code, index) with code = op * S + stage; an input is a slot.

    Slot of wire number w, microbatch k: w * N + k. It holds the arrival time. Those of sums come after.
    """

    def __init__(self, schedule: Schedule, table: CostTable, links: Links | None) -> None:
        self.schedule, self.table, self.links = schedule, table, links
        self.num_stages = schedule.num_stages
        self.num_slots = schedule.total_microbatches
        self.durations = [table.column(op)[s] for op in _OPS for s in range(self.num_stages)]
        count = len(self.durations)
        self.inputs: list[list[int]] = [[] for _ in range(count)]  # code -> slot bases
        self.outputs: list[list[_Output]] = [[] for _ in range(count)]  # by code
        self.sums: dict[tuple[int, ...], _StageSum] = {}  # by the stages that hold the weights
        # Per rank, the sums that it begins in front of each position of its program.
        self.begins: list[dict[int, list[Collective]]] = [{} for _ in schedule.programs]
        self.needs = Needs(schedule)
        self.wires = self.needs.wires
        self.parts: dict[int, list[tuple[Wire, _Output]]] = {}  # by code, where others add to them
        self.traffic = None if links is None else Traffic(links)
        self.end_of_slots = len(self.wires) * self.num_slots
        self.gathers: dict[int, _StageGather] = {}  # by stage
        self.ahead: frozenset[int] = frozenset()  # of these stages, ahead of the batch
        self.at_first: list[int] = []  # slots of forwards that use the first weights
        self._wire()
        self._find_sums()
        self.arrived = [_NOT_YET] * self.end_of_slots
        for slot in self.at_first:
            self.arrived[slot] = 0.0

    def _code(self, op: Op, stage: int) -> int:
        return _OPS.index(op) * self.num_stages + stage

    def _wire(self) -> None:
        """Give each wire that crosses ranks its slots. One within a rank needs none: program order suffices."""
        owners = self.schedule.owners
        sizes = {} if self.links is None else wire_bytes(self.schedule, self.links, self.wires)
        for number, wire in enumerate(self.wires):
            if owners[wire.src] == owners[wire.dst]:
                continue
            base = number * self.num_slots
            routes = None if self.traffic is None else self._routes(wire, sizes[wire], self.traffic)
            output = (base, self._delays(wire), routes)
            for op in wire.ops:
                for stage in wire.users:
                    self.inputs[self._code(op, stage)].append(base)
                for stage in wire.makers:
                    self.outputs[self._code(op, stage)].append(output)
                    self.parts.setdefault(self._code(op, stage), []).append((wire, output))
        self.parts = {
            code: outputs for code, outputs in self.parts.items() if any(len(w.makers) > 1 for w, _ in outputs)
        }

    def _delays(self, wire: Wire) -> list[float]:
        """Latency per microbatch from stage to stage: none where replicas of both stand on one rank."""
        latency, owner = self.table.latency[wire.src], self.schedule.owner
        if not set(self.schedule.owners[wire.src]) & set(self.schedule.owners[wire.dst]):
            return [latency] * self.num_slots
        return [0.0 if owner(wire.src, k) == owner(wire.dst, k) else latency for k in range(self.num_slots)]

    def _routes(self, wire: Wire, num_bytes: float, traffic: Traffic) -> list[Route | None]:
        """Route per microbatch from stage to stage: None where replicas of both stand on one rank."""
        owner, latency = self.schedule.owner, self.table.latency[wire.src]
        between: dict[tuple[int, int], Route | None] = {}
        pairs = [(owner(wire.src, k), owner(wire.dst, k)) for k in range(self.num_slots)]
        for src, dst in pairs:
            if (src, dst) not in between:
                here = src == dst
                between[src, dst] = None if here else traffic.message(src, dst, num_bytes=num_bytes, latency=latency)
        return [between[pair] for pair in pairs]

    def _find_sums(self) -> None:
        schedule = self.schedule
        sums: Sequence[Sum] = () if self.links is None else self.links.sums
        for each in sums:
            if not 0 <= each.stage < self.num_stages:
                raise ValueError(f"a sum of stage {each.stage}: expected a stage from 0 to {self.num_stages - 1}")
        if not schedule.has_backward:
            return
        groups = range(max(1, schedule.num_batches * schedule.groups_per_batch))
        routes = {(each.stage,): self.traffic.sum(each) for each in sums if self.traffic is not None}
        for stages, route in (self._sums_by_costs() | routes).items():
            owners = Collective(stages, Op.REDUCE_GRAD, 0).ranks(schedule.owners)
            self.sums[stages] = _StageSum(owners, route, base=self.end_of_slots)
            if not schedule.has_epilogue:
                self.inputs[self._code(Op.U, stages[0])].append(self.end_of_slots)
            self.end_of_slots += len(groups) * len(owners)
        wanted = [Collective(stages, Op.REDUCE_GRAD, group) for stages in self.sums for group in groups]
        self._find_gathers([each for each in sums if each.gather > 0])
        wanted += [Collective((stage,), Op.UNSHARD, 0) for stage in self.ahead]
        for begins, placed in zip(self.begins, place_collectives(schedule, wanted), strict=True):
            for position, collective in placed:
                begins.setdefault(position, []).append(collective)

    def _find_gathers(self, sums: Sequence[Sum]) -> None:
        schedule = self.schedule
        self.ahead = frozenset(each.stage for each in sums if each.unshards)
        if self.ahead and schedule.is_asynchronous:
            raise ValueError(
                f"weights of stage {min(self.ahead)} that are gathered for a batch under the asynchronous schedule "
                f"{schedule.name!r}: expected Sum(..., unshards=False)"
            )
        used = derive_versions(schedule).used if sums and not schedule.has_epilogue else {}
        for each in sums:
            assert self.traffic is not None
            users: dict[int, list[int]] = {0: list(range(self.num_slots))} if each.stage in self.ahead else {}
            base, route = self.end_of_slots, self.traffic.gather(each)
            if not schedule.has_epilogue:
                for k in range(self.num_slots):
                    version = used[each.stage, k]
                    if version:
                        users.setdefault(version - 1, []).append(k)
                    else:
                        self.at_first.append(base + k)
            self.gathers[each.stage] = _StageGather(schedule, each.stage, route, base=base, users=users)
            if users:
                self.inputs[self._code(Op.F, each.stage)].append(base)
                self.end_of_slots += self.num_slots

    def _sums_by_costs(self) -> dict[tuple[int, ...], Route]:
        """Routes by stages of sums over replicas and over stages that share weights; a rank has one lane for them."""
        lanes = [Channel() for _ in self.schedule.placement]
        sums: dict[tuple[int, ...], float] = {(s,): seconds for s, seconds in enumerate(self.table.reduce_grad)}
        if self.schedule.has_epilogue:
            sums.update(self.table.tied)
        routes = {}
        for stages, seconds in sums.items():
            ranks = Collective(stages, Op.REDUCE_GRAD, 0).ranks(self.schedule.owners)
            if seconds > 0 and len(ranks) > 1:
                routes[stages] = Route(seconds, 0.0, [lanes[rank] for rank in ranks])
        return routes

    def run(self) -> Timeline:
        programs = self._encode()
        starts = self._play(programs)
        ranks = []
        for rank, program in enumerate(self.schedule.programs):
            durations = self.durations
            codes = programs[rank][0]
            compute = [
                Span(action, start, start + durations[code])
                for action, start, code in zip(program, starts[rank], codes, strict=True)
            ]
            ranks.append(RankTrace(compute=tuple(compute)))
        if self.schedule.has_epilogue:
            ranks = self._with_epilogue(ranks)
        if self.links is not None or any(self.table.latency):
            ranks = [replace(trace, comm=comm) for trace, comm in zip(ranks, self._messages(ranks), strict=True)]
        if self.sums:
            ranks = [replace(trace, collectives=own) for trace, own in zip(ranks, self._collectives(), strict=True)]
        return Timeline(schedule=self.schedule, ranks=tuple(ranks))

    def _encode(self) -> list[tuple[list[int], list[int]]]:
        """Programs as (codes, indices)."""
        code_of = {(op.value, s): i * self.num_stages + s for i, op in enumerate(_OPS) for s in range(self.num_stages)}
        encoded = []
        for rank, program in enumerate(self.schedule.programs):
            try:
                encoded.append(([code_of[op, stage] for stage, op, _ in program], [k for _, _, k in program]))
            except KeyError as error:
                op, stage = error.args[0]
                raise ScheduleError(
                    f"rank {rank} runs {op} of stage {stage}, which has no cost: expected F B I W U of the stages "
                    f"0..{self.num_stages - 1}"
                ) from None
            if self.sums:
                self._encode_updates(rank, program, encoded[rank][1])
        return encoded

    def _encode_updates(self, rank: int, program: tuple[Action, ...], indices: list[int]) -> None:
        """Updates that wait for a sum look at the slot of their own rank."""
        for at, (stage, op, group) in enumerate(program):
            if op is Op.U and (stage,) in self.sums:
                owners = self.schedule.owners[stage]
                indices[at] = group * len(owners) + owners.index(rank)

    def _play(self, programs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The event loop; returns the start times in program order."""
        arrived = self.arrived
        starts: list[list[float]] = [[] for _ in programs]
        position = [0] * len(programs)
        free_at = [0.0] * len(programs)
        blocked: dict[int, int] = {}  # slot -> the rank that stands before it
        events: list[tuple[float, int]] = []  # (end of the running action, rank)
        inputs, outputs, durations = self.inputs, self.outputs, self.durations
        begins = self.begins
        behind = {self._code(Op.U, stage): each for stage, each in self.gathers.items() if stage not in self.ahead}
        self._begin_at_once(blocked)
        ready = list(range(len(programs)))
        while True:
            for rank in ready:
                codes, indices = programs[rank]
                at = position[rank]
                if at == len(codes):
                    continue
                code, k = codes[at], indices[at]
                start = free_at[rank]
                for base in inputs[code]:
                    arrival = arrived[base + k]
                    if arrival == _NOT_YET:
                        blocked[base + k] = rank
                        break
                    if arrival > start:
                        start = arrival
                else:
                    starts[rank].append(start)
                    heappush(events, (start + durations[code], rank))
            if not events:
                break
            now, rank = heappop(events)
            codes, indices = programs[rank]
            at = position[rank]
            code, k = codes[at], indices[at]
            position[rank] = at + 1
            free_at[rank] = now
            ready = [rank]
            for base, delays, routes in self._completed(code, k) if code in self.parts else outputs[code]:
                if routes is None or (route := routes[k]) is None:
                    arrived[base + k] = now + delays[k]
                else:
                    arrived[base + k] = route.carry(now)
                waiter = blocked.pop(base + k, None)
                if waiter is not None:
                    ready.append(waiter)
            ready += self._begin(begins[rank][at + 1], rank, now, blocked) if at + 1 in begins[rank] else ()
            ready += self._gather(behind[code], k, rank, now, blocked) if code in behind else ()
        self._check_through(position)
        return starts

    def _begin_at_once(self, blocked: dict[int, int]) -> None:
        """Ranks begin the sums of gradients of which they make none."""
        for rank, own in enumerate(self.begins):
            self._begin(own.get(0, ()), rank, 0.0, blocked)

    def _begin(self, sums: Iterable[Collective], rank: int, now: float, blocked: dict[int, int]) -> list[int]:
        """A rank begins sums; returns the ranks that stood blocked on them."""
        freed: list[int] = []
        for stages, op, group in sums:
            begun = self.sums[stages] if op is Op.REDUCE_GRAD else self.gathers[stages[0]]
            freed += begun.begin(group, rank, now, self.arrived, blocked)
        return freed

    def _gather(self, gather: _StageGather, index: int, rank: int, now: float, blocked: dict[int, int]) -> list[int]:
        """A rank has updated its part of weights; returns the ranks that stood blocked on them."""
        return gather.begin(index // gather.num_owners, rank, now, self.arrived, blocked)  # see _encode_updates

    def _completed(self, code: int, index: int) -> list[_Output]:
        """Messages that are whole behind an action, in the order of the edges: to the others, more will be added."""
        op, stage = divmod(code, self.num_stages)
        action = Action(stage, _OPS[op], index)
        return [output for wire, output in self.parts[code] if self.needs.maker(wire.message(index)) == action]

    def _check_through(self, position: list[int]) -> None:
        for rank, program in enumerate(self.schedule.programs):
            if position[rank] < len(program):
                raise ScheduleError(
                    f"rank {rank} never gets what {program[position[rank]]} needs: "
                    f"the schedule deadlocks; check(schedule) prints the cycle"
                )

    def _with_epilogue(self, ranks: list[RankTrace]) -> list[RankTrace]:
        """The optimizer steps of a flush schedule, stage by stage, each behind the sums of its gradients."""
        ends = [trace.compute[-1].end if trace.compute else 0.0 for trace in ranks]
        summed: dict[int, float] = {}
        for stages, each in self.sums.items():
            summed.update((stage, max(each.through[0], summed.get(stage, 0.0))) for stage in stages)
        if self.table.norm is not None:
            ends = [max([*ends, *summed.values()]) + self.table.norm] * len(ranks)
        extended = []
        for rank, trace in enumerate(ranks):
            spans = list(trace.compute)
            end = ends[rank]
            for stage in self.schedule.placement[rank]:
                update = self.table.update[stage]
                if update > 0 or self.table.norm or stage in summed:
                    start = max(end, summed.get(stage, 0.0))
                    end = start + update
                    spans.append(Span(Action(stage, Op.U, 0), start, end))
            extended.append(RankTrace(compute=tuple(spans)))
        self._gather_behind(extended)
        return extended

    def _gather_behind(self, ranks: list[RankTrace]) -> None:
        """Behind a flush, the weights that were updated in parts, in the order in which they are."""
        updates = [
            (end, rank, a.stage) for rank, trace in enumerate(ranks) for a, _, end in trace.compute if a.op is Op.U
        ]
        for end, rank, stage in sorted(updates):
            if stage in self.gathers and stage not in self.ahead:
                self.gathers[stage].begin(0, rank, end, self.arrived, {})

    def _messages(self, ranks: list[RankTrace]) -> list[tuple[Span[Message], ...]]:
        """The comm lane of each receiver: each message from when it was ready to its arrival."""
        comm: list[list[Span[Message]]] = [[] for _ in ranks]
        owner = self.schedule.owner
        outgoing: dict[tuple[Op, int], list[tuple[int, Wire]]] = {}
        for number, wire in enumerate(self.wires):
            for op in wire.ops:
                for stage in wire.makers:
                    outgoing.setdefault((op, stage), []).append((number * self.num_slots, wire))
        for rank, trace in enumerate(ranks):
            for (stage, op, k), _, end in trace.compute:
                for base, wire in outgoing.get((op, stage), ()):
                    message, receiver = wire.message(k), owner(wire.dst, k)
                    if receiver != rank and self.needs.maker(message) == (stage, op, k):
                        comm[receiver].append(Span(message, end, self.arrived[base + k]))
        return [tuple(sorted(spans, key=attrgetter("start"))) for spans in comm]

    def _collectives(self) -> list[tuple[Span[Collective], ...]]:
        """The lane of collectives of each rank: each from when this rank began it until it was through."""
        lanes: list[list[Span[Collective]]] = [[] for _ in self.schedule.placement]
        for stages, each in self.sums.items():
            for group, through in each.through.items():
                for rank, begun in each.begun[group].items():
                    lanes[rank].append(Span(Collective(stages, Op.REDUCE_GRAD, group), begun, through))
        for stage, gather in self.gathers.items():
            for group, through in gather.through.items():
                for rank, begun in gather.begun[group].items():
                    lanes[rank].append(Span(Collective((stage,), Op.UNSHARD, group), begun, through))
        return [tuple(sorted(spans, key=attrgetter("start"))) for spans in lanes]
