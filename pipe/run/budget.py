"""Recomputation under a memory budget: the cut units of a stage to recompute so that it fits, in the least time.

    trace    a microbatch through the stage, alone: bytes that each unit keeps, bytes within it, seconds
    moments  where the stage may hold most: F and B of each unit, with the microbatches in flight of its schedule
    fit      of all choices that stay below the budget at every moment the one with the least seconds

Each rank tries its own stages, with a microbatch of its first training batch: once with all units under each rule, and
then with the choice, whose measurement decides. A later batch with microbatches of other sizes uses an earlier choice
for sizes at least as large in each dimension, or else gets its own.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from operator import ge
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.memory import GRADIENTS_SENT, count_in_flight
from ...partition.model.calls import Calls
from ...partition.model.forms import tensors_in
from ...partition.model.units import MODEL_INPUT
from ...partition.model.untouched import untouched
from ...partition.profiler.clock import Stamp, clock_for
from ...partition.profiler.measure import state_bytes
from ...partition.profiler.memory import LiveBytes, bytes_of, storage_bytes
from ...partition.profiler.optimizers import optimizers_of_copies
from ...partition.profiler.passes import profiled
from ...partition.topology import Floats
from ...schedules import Op
from ...schedules.wording import duration, size
from ..batch.agreement import agreed
from ..batch.batches import Batch
from ..context import Run
from ..settings.recompute import BUDGET
from ..stage.reruns import CheckpointedModules
from ..stage.stage import Stage
from ..stage.wiring import Mode
from ..telling import told_if_slow
from .ranks import Ranks

RULES = ("none", "selective", "full")
ROUNDS, SECONDS = 15, 3.0  # timed microbatches under each rule: at least two, then until this time has passed
TRIALS = 5  # choices to try, where one holds more than its units were measured to
TOLD_SECONDS = 1.0  # after which a message is shown

Choice = Sequence[int]  # by unit, the number of its rule
Sizes = dict[tuple[int, ...], Sequence[int]]  # of tensors, by their numbers of dimensions
Point = tuple[Op, int, int]  # an action; microbatches in flight, with its own; a call within it


class HeldMoments(NamedTuple):
    """Bytes of a stage: `base` [n], the same under every choice, and `held` [n, units, rules]."""

    base: Floats
    held: Floats

    def peak(self, choice: Choice) -> float:
        return float(self.by_moment(choice).max())

    def by_moment(self, choice: Choice) -> Floats:
        return np.asarray(self.base + self.held[:, np.arange(len(choice)), list(choice)].sum(axis=1))


def fit(seconds: Floats, moments: HeldMoments, limit: float | None) -> Choice | None:
    """Choice of least seconds [units, rules] of those whose peak is at most `limit`; None: there is none. Without a
    limit one with the least peak. A multiple-choice knapsack with a row for each moment, solved to optimality by HiGHS,
    so that seconds never rise with the limit; solutions that only its tolerance admits are cut off."""
    (num_moments, num_units, num_rules), width = moments.held.shape, seconds.size
    if not width:
        return () if limit is None or moments.peak(()) <= limit else None
    scale = float((moments.base + moments.held.max(axis=2).sum(axis=1)).max()) or 1.0
    rows = np.hstack([moments.held.reshape(num_moments, width) / scale, -np.ones((num_moments, 1))])
    picks = np.hstack([np.kron(np.eye(num_units), np.ones(num_rules)), np.zeros((num_units, 1))])
    costs = np.append(seconds.ravel() / (seconds.max() or 1.0) * 1e3, 0.0)  # far above the gap that the solver leaves
    if limit is None:
        costs = np.append(np.zeros(width), 1.0)
    top = np.append(np.ones(width), math.inf if limit is None else limit / scale)
    rules = [LinearConstraint(picks, 1, 1), LinearConstraint(rows, -math.inf, -moments.base / scale)]
    whole, options = np.append(np.ones(width), 0), {"mip_rel_gap": 0.0}
    while True:
        found = milp(costs, constraints=rules, integrality=whole, bounds=Bounds(0, top), options=options)
        if found.x is None:
            return None
        choice: Choice = found.x[:-1].reshape(num_units, num_rules).argmax(axis=1).tolist()
        if limit is None or moments.peak(choice) <= limit:
            return choice
        rules.append(LinearConstraint(np.append(np.eye(num_rules)[choice].ravel(), 0.0), -math.inf, num_units - 1))


def least(seconds: Floats, moments: HeldMoments) -> Choice:
    smallest = fit(seconds, moments, None)
    assert smallest is not None
    return fit(seconds, moments, moments.peak(smallest)) or smallest


class _UnitTrace(NamedTuple):
    """A microbatch of one stage, by its units' calls, 1 to C; 0 and C + 1: before and after them."""

    units: list[int]  # of the calls
    kept: Floats  # [C + 2] bytes held after F
    most: Mapping[tuple[Op, int], int]  # bytes within F and B
    seconds: Floats  # [C + 2] of both


class _Probe:
    """A stage, and its largest microbatch of this batch, which it runs alone under any choice to measure it."""

    def __init__(self, run: Run, mode: Mode, stage: Stage, batch: Batch) -> None:
        own = (part for part in batch.parts if part.inputs is not None)
        part = max(own, key=lambda part: bytes_of(tensors_in(part.inputs, part.target)))
        self.module, self.specs = part.inferred.stages[stage.index], part.inferred.specs
        self.units = tuple(dict.fromkeys(self.module.units))
        names = {module: name for name, module in run.root.named_modules()}
        self.names = [names.get(unit, type(unit).__name__) for unit in self.units]
        self.inputs: list[torch.Tensor] = []
        for ref in self.module.inputs:
            if ref.producer == MODEL_INPUT:
                assert part.inputs is not None
                self.inputs.append(part.inputs[ref.slot])
            else:  # like the output of the stage before: small numbers, zeros for integers
                spec = self.specs[ref.producer][ref.slot]
                x = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=run.options.device)
                self.inputs.append(x.normal_() if x.is_floating_point() else x.zero_())
        is_last, loss = stage.index + 1 == mode.schedule.num_stages, run.options.loss_fn
        targets = part.target if is_last else None
        # All that its run may change: the stage cut for other shapes has no loss in it.
        self.roots = [self.module.module, *([loss] if is_last and isinstance(loss, nn.Module) else [])]
        given = [x for ref, x in zip(self.module.inputs, self.inputs, strict=True) if ref.producer == MODEL_INPUT]
        self.given_bytes = bytes_of(tensors_in(given, targets))
        self._wants, self._target = mode.wants_grad[stage.index], part.target
        self._stage, self._batch, self._seeder = stage, batch, run.seeder
        self._clock = clock_for(run.options.device)

    def reruns(self, choice: Choice) -> CheckpointedModules:
        """The recomputed modules of a choice, after a run that shows which tensors change in place."""
        each = zip(self.units, self.names, choice, strict=True)
        found = CheckpointedModules({unit: (name, RULES[rule]) for unit, name, rule in each if rule}, self._seeder)
        self.trace(found, None)
        return found

    def trace(self, reruns: CheckpointedModules, live: LiveBytes | None) -> _UnitTrace:
        """F and B as the stage runs them; `live` counts bytes, and without it seconds are those of training."""
        # A point (F or B, c) is between two marks: the c-th call of a unit, and what follows until the next one.
        units, most = list[int](), defaultdict[tuple[Op, int], int](int)
        stamps: list[tuple[int, Stamp]] = [(0, self._clock.stamp())]
        makers: dict[int, int] = {}  # by storage: the call in which it was made
        now, alive = (Op.F, 0), {} if live is None else live.made()

        def enter(point: tuple[Op, int], _: object = None) -> None:
            nonlocal now, alive
            stamps.append((now[1], self._clock.stamp()))
            if live is not None:
                before, alive = alive, live.made()
                makers.update((key, now[1]) for key, one in alive.items() if before.get(key) is not one)
                most[now], live.most = max(most[now], live.most), live.level
            now = point

        def mark(unit: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if now[0] is Op.B:
                return forward(*args, **kwargs)
            units.append(unit)
            backward = partial(enter, (Op.B, len(units)))
            enter((Op.F, len(units)))
            value = forward(*args, **kwargs)
            for x in pytree.tree_leaves(value):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(backward)  # type: ignore[no-untyped-call]
            return value

        stage, batch, counted = self._stage.trial(reruns), self._batch, live or nullcontext()
        with Calls({unit: partial(mark, number) for number, unit in enumerate(self.units)}).through():
            self._seeder.begin(step=batch.step, microbatch=0)
            with counted, batch.autocast.again():
                outputs, loss = stage.forward(0, self.module, self.inputs, self._wants, self._target)
            self._seeder.end()
            enter((Op.B, len(units) + 1))
            kept = np.zeros(len(units) + 2)
            for key, (_, number, _) in alive.items():
                kept[makers[key]] += number
            ends = outputs if loss is None else (loss[0],)
            gradients = [torch.full_like(x, 1e-3) if x.is_floating_point() else None for x in ends]
            self._seeder.begin(step=batch.step, microbatch=0)
            with counted, batch.autocast.off():
                stage.backward(0, gradients, [True] * len(ends), autocast=batch.autocast)
            self._seeder.end()
            enter(now)
        self._clock.settle()
        seconds = np.zeros(len(units) + 2)
        for (_, begin), (call, end) in pairwise(stamps):
            seconds[call] += self._clock.between(begin, end)
        return _UnitTrace(units, kept, most, seconds)

    def seconds(self, every: Sequence[CheckpointedModules]) -> Floats:
        """[units, rules] additional seconds of each unit per microbatch, relative to the first rule."""
        took, begun = np.full((len(self.units), len(every)), math.inf), time.perf_counter()
        for number in range(ROUNDS):
            for rule, reruns in enumerate(every if number < 2 or time.perf_counter() - begun < SECONDS else ()):
                trace = self.trace(reruns, None)
                each = trace.seconds[1:-1] @ np.eye(len(self.units))[trace.units]
                took[:, rule] = np.minimum(took[:, rule], each)  # other load on the machine only adds seconds
        return np.where(np.arange(len(every)) > 0, np.maximum(took - took[:, :1], 1e-6), 0.0)


class _HeldAlways(NamedTuple):
    """Points at which a stage may hold most, and `others`, all bytes there but activations; the update first."""

    points: Sequence[Point]
    others: Floats

    def most(self, trace: _UnitTrace) -> float:
        """The peak [bytes] where every microbatch in flight is like this one."""
        kept = trace.kept.sum()
        each = [(n - (op is not Op.U)) * kept + trace.most.get((op, call), 0) for op, n, call in self.points]
        return float((self.others + each).max())

    def moments(self, traces: Sequence[_UnitTrace], num_units: int) -> HeldMoments:
        """By unit and rule; a call is taken to hold as much as when all units have its rule."""
        units, kept = np.eye(num_units)[traces[0].units], np.array([trace.kept for trace in traces])
        bases, held = [], []
        for (op, in_flight, call), others in zip(self.points, self.others, strict=True):
            done = 0 if op is Op.U else call + (op is Op.B)  # calls that keep something of this microbatch
            share = kept * (in_flight - (op is not Op.U) + (np.arange(kept.shape[1]) < done))
            if op is not Op.U:
                share[:, call] += [trace.most.get((op, call), 0) for trace in traces] - kept[:, :done].sum(axis=1)
            bases.append(others + share[0, 0] + share[0, -1])
            held.append((share[:, 1:-1] @ units).T)
        return HeldMoments(np.array(bases), np.array(held))


class Budgets:
    """Decides, for a training batch, what this process's stages recompute under a budget. Raises ValueError with
    options whose memory is not counted here."""

    def __init__(self, mode: Mode, ranks: Ranks) -> None:
        self._run, self._mode, self._ranks, self._ownership = ranks.update.run, mode, ranks, ranks.update.ownership
        run, self._recomputed = self._run, ranks.parts.recomputed
        layout, schedule = run.layout, mode.schedule
        others = {
            f"schedule={schedule.name!r}, which splits backwards": bool(schedule.split_stages),
            f"schedule={schedule.name!r} of slices": schedule.num_slices > 1,
            f"schedule={schedule.name!r}, whose activations move": schedule.moves_activations,
            "compile=": run.options.compile is not None,
            "a tensor group": layout.place.tensor[1] > 1,
            "a divided optimizer": layout.sharding.is_any,
            "an nn.SyncBatchNorm": layout.place.world.distributed
            and any(isinstance(module, nn.SyncBatchNorm) for module in run.root.modules()),
        }
        self._choices: list[tuple[Sizes, Mapping[int, CheckpointedModules]]] = []
        for what in (what for what, is_there in others.items() if is_there):
            raise ValueError(
                f"recompute={{{BUDGET!r}: ...}} with {what}: expected a word, such as recompute='layer', or a schedule "
                f"of whole backwards such as '1f1b', without the other option"
            )

    def decide(self, batch: Batch) -> None:
        """Collective over the processes, if no earlier batch had as large microbatches. ValueError, on every rank
        alike, for a stage that fits under no choice."""
        sizes = _sizes(batch)
        chosen = next((chosen for before, chosen in self._choices if _cover(before, sizes)), None)
        if chosen is None:
            chosen = self._decided(batch)
            self._choices.append((sizes, chosen))
        for each in self._ranks.stages.values():
            for s in chosen.keys() & each.keys():
                each[s].reruns = chosen[s]

    def _decided(self, batch: Batch) -> Mapping[int, CheckpointedModules]:
        run, limits = self._run, self._run.layout.recompute.stages
        stages = {s: stage for each in self._ranks.stages.values() for s, stage in each.items()}
        is_stream = self._mode.schedule.is_asynchronous
        alone = batch.replica[1] > 1 and run.layout.place.world.distributed  # other replicas do not know its sizes

        def choose() -> dict[int, CheckpointedModules]:
            limited = [(stage, limit) for s, stage in stages.items() if isinstance(limit := limits[s], float)]
            return {stage.index: self._chosen(stage, batch, limit) for stage, limit in limited}

        left_alone = untouched(*run.options.user_code, device=run.options.device)
        with run.guard.together(), left_alone, run.seeder.call():
            if self._choices and (is_stream or alone):
                raise ValueError(
                    f"step {batch.step}: microbatches larger than those that recompute={{{BUDGET!r}: ...}} was decided "
                    f"for, with {'an asynchronous schedule' if is_stream else 'data replicas'}: expected the largest "
                    f"batch first, or a word, such as recompute='layer'"
                )
            return agreed(choose, run.collectives, run.guard, what="choosing what runs again")

    def _chosen(self, stage: Stage, batch: Batch, limit: float) -> CheckpointedModules:
        run, s, probe = self._run, stage.index, _Probe(self._run, self._mode, stage, batch)
        what, rank = f"measuring what the units of stage {s} keep and take", run.layout.place.world.rank
        slow = told_if_slow(what, rank=rank, silent=TOLD_SECONDS)
        why = [self._recomputed.parted(unit) for unit in probe.units]
        optimizer = self._optimizer_bytes(probe, s)
        with slow, profiled(*probe.roots, device=run.options.device):
            every = [probe.reruns([0 if each else rule for each in why]) for rule in range(len(RULES))]
            traces = [probe.trace(every[0], LiveBytes())]
            always = self._held_always(probe, s, len(traces[0].units), optimizer)
            plain = always.most(traces[0])
            if plain <= limit:
                self._recomputed.reasons[s] = f"budget {size(limit)}: {size(plain)} at the most, nothing runs again"
                return every[0]
            traces += [probe.trace(each, LiveBytes()) for each in every[1:]]
            moments, seconds = always.moments(traces, len(probe.units)), probe.seconds(every)
            target = limit
            for trial in range(TRIALS + 1):
                fitting = fit(seconds, moments, target) if trial < TRIALS else None
                choice = fitting or least(seconds, moments)
                reruns = probe.reruns(choice)
                most = always.most(probe.trace(reruns, LiveBytes()))
                if most <= limit or fitting is None:
                    break
                target = moments.peak(choice) - (most - limit)
        if most > limit:
            raise ValueError(
                f"recompute={{{BUDGET!r}: ...}}: {limit:.0f} bytes for stage {s} ({stage.name}), and the least that "
                f"fits is {math.ceil(most)}B; weights, gradients, optimizer and messages alone take "
                f"{math.ceil(always.others[0])}B. Expected {{{BUDGET!r}: '{math.ceil(most)}B'}} or more, more stages, "
                f"or smaller microbatches"
            )
        took = duration(sum(float(seconds[unit, rule]) for unit, rule in enumerate(choice)))
        total = f"budget {size(limit)}: {size(most)} at the most, {size(plain)} with nothing run again; {took} more"
        lines = _lines(probe.names, choice, moments, seconds, why)
        self._recomputed.reasons[s] = "\n".join([f"{total} a microbatch", *lines])
        return reruns

    def _held_always(self, probe: _Probe, s: int, num_calls: int, optimizer: tuple[int, int]) -> _HeldAlways:
        run, schedule, stages = self._run, self._mode.schedule, self._mode.inference.stages
        parameters = dict.fromkeys(p for root in probe.roots for p in root.parameters())
        buffers = dict.fromkeys(x for root in probe.roots for x in root.buffers())
        local, trained = set(run.local_stages), [p for p in parameters if p.requires_grad]
        versions = max(count_in_flight(schedule)[rank].versions for rank in schedule.owners[s])
        late = run.options.correction is not None  # which keeps the last update
        held = float(storage_bytes(parameters) * versions + bytes_of(trained) * (1 + late) + optimizer[0])
        held += storage_bytes(buffers) + self._ranks.update.summing_bytes(s, trained)
        inputs = list(zip(probe.module.inputs, probe.inputs, strict=True))
        received = bytes_of(x for ref, x in inputs if ref.producer not in (MODEL_INPUT, *local))
        # A stream copies batches, two of which are in flight; other batches are moved to the device as a whole.
        copies = 2 if schedule.is_asynchronous else int(run.options.device.type != "cpu")
        held += copies * schedule.num_microbatches * probe.given_bytes
        consumers = {c for c, stage in enumerate(stages) for ref in stage.inputs if ref.producer == s}
        specs = [spec for spec in probe.specs[s] if spec.requires_grad and consumers]
        returned = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        ahead = min(self._mode.receives_ahead, schedule.num_microbatches - 1)
        held += (ahead + GRADIENTS_SENT) * received
        most = {Op.U: 0, Op.F: 0, Op.B: 0}
        for rank in schedule.owners[s]:
            in_flight = 0
            for action in schedule.programs[rank]:
                if action.stage == s and action.op in most:
                    in_flight += action.op is Op.F
                    most[action.op] = max(in_flight, most[action.op])
                    in_flight -= action.op is Op.B
        waiting = min(ahead, most[Op.B] - 1 if consumers <= local else ahead)  # gradients that have arrived early
        more = {Op.U: optimizer[1], Op.F: waiting * returned, Op.B: (waiting + 1) * returned}
        calls = {Op.U: range(1), Op.F: range(num_calls + 1), Op.B: range(1, num_calls + 2)}
        points = [(op, number, call) for op, number in most.items() for call in calls[op]]
        return _HeldAlways(points, np.array([held + number * received + more[op] for op, number, _ in points]))

    def _optimizer_bytes(self, probe: _Probe, s: int) -> tuple[int, int]:
        """Bytes of the state of a stage's optimizers, and of their step; measured on copies."""
        named, factory = self._ownership.stage_parameters(s), self._run.options.optimizer
        if factory is None or not named:
            return 0, 0
        made = optimizers_of_copies(factory, named, probe.module.module, probe.inputs, where=f"stage {s}")
        with LiveBytes() as live:
            for optimizer in made:
                optimizer.step()
        live.settle()
        return state_bytes(made), live.most - live.level


def _sizes(batch: Batch) -> Sizes:
    found: Sizes = {}
    for tensors in (tensors_in(part.inputs, part.target) for part in batch.parts if part.inputs is not None):
        shapes = [(x.itemsize, x.numel()) if x.is_nested else (x.itemsize, *x.shape) for x in tensors]
        own, kind = [number for shape in shapes for number in shape], tuple(map(len, shapes))
        found[kind] = list(map(max, own, found.get(kind, own)))
    return found


def _cover(before: Sizes, sizes: Sizes) -> bool:
    return all(kind in before and all(map(ge, before[kind], own)) for kind, own in sizes.items())


def _lines(
    names: Sequence[str], choice: Choice, moments: HeldMoments, seconds: Floats, why: Sequence[str | None]
) -> list[str]:
    """Lines on recomputed units and their effect, on units that are not needed, and on refused ones, with reasons."""
    plain, lines = moments.by_moment([0] * len(choice)), []
    for unit, (name, rule, reason) in enumerate(zip(names, choice, why, strict=True)):
        freed = (moments.held[:, unit, :1] - moments.held[:, unit]).T  # [rules, moments]
        if rule:
            number, took = size(freed[rule, plain.argmax()]), duration(float(seconds[unit, rule]))
            lines.append(f"  runs again  {name} ({RULES[rule]}): {number} at the fullest for {took}")
        elif reason is None and ((plain - freed).max(axis=1) < plain.max()).any():
            lines.append(f"  not needed  {name}")
        else:
            useless = "what it frees is not there, or made again, when the stage holds most"
            lines.append(f"  refused     {name}: {reason or (useless if (freed > 0).any() else 'it keeps as much')}")
    return lines
