"""The checker: proves a schedule complete and free of deadlock, or reports where it is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from .collectives import find_cycle, latest_positions, ready_positions
from .dependencies import Dependencies, find_moves
from .ir import COMPUTE_OPS, MOVE_OPS, Action, Collective, Op, Schedule, ScheduleError, fitting_owners
from .liveness import peak_activations
from .messages import STAGE_KINDS, Message, Transfer
from .program import GroupStep, Lowered, RankProgram
from .progress import where_sends_wait
from .versions import check_rule, check_updates, derive_versions

_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures that `check` derived, none of them copied from the schedule's own claims."""

    num_actions: int  # compute actions over all ranks
    # per rank, the most stage activations alive at once, if moves of activations take no time
    peak_activations: tuple[int, ...]
    peak_versions: tuple[int, ...]  # per rank, the most weight versions of one stage kept at once
    # per rank, the most updates of a stage between the weights of a gradient and those it is applied to; 0 for every
    # flush schedule
    staleness: tuple[int, ...]
    # per rank, the most updates of a stage between the forward and the backward of a microbatch, where the backward
    # uses weights that have changed; 0 where it uses those of the forward
    drift: tuple[int, ...]


def check(schedule: Schedule) -> Report:
    """Prove that the schedule can run to its end, or raise ScheduleError.

    Checked: each action that is needed occurs exactly once, on the rank that owns it; there is no deadlock (the error
    prints the cycle of program order and data); updates come after the gradients that they apply, and weight versions
    follow the declared rule. `check_lowered` does the same for the sends and receives of a lowered schedule.

    O(actions * in-degree).
    """
    _check_complete(schedule)
    find_moves(schedule)
    _check_acyclic(schedule)
    versions = derive_versions(schedule)
    check_updates(schedule)
    if schedule.has_backward:
        check_rule(schedule, versions)
    return Report(
        num_actions=sum(a.op in COMPUTE_OPS for program in schedule.programs for a in program),
        peak_activations=tuple(peak_activations(program) for program in schedule.programs),
        peak_versions=versions.peak_live,
        staleness=versions.staleness,
        drift=versions.drift,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredReport:
    """Number of messages over all links; and `held`, the circle of ranks that would deadlock over a transport which
    blocks a send until its receive is posted (NCCL's rendezvous), None where there is none."""

    num_messages: int
    held: str | None


def check_lowered(lowered: Lowered) -> LoweredReport:
    """Prove that the sends and receives of each link are the same messages in the same order, so that order alone
    matches them.

    Also that each rank still runs its program, sends only what it has computed, and posts each receive before the
    action that needs it; that each collective is on each of its ranks exactly once, no earlier than it may begin, in
    orders without a deadlock; and that all ranks reach their end. Raises ScheduleError that names the link and the
    first difference between its two sides, the rank and the step, or the circle of ranks.
    """
    needs = Dependencies(lowered.schedule)
    for program in lowered.programs:
        _check_steps(lowered.schedule, program, needs)
    _check_collectives(lowered)
    sends: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in lowered.programs:
        for step in program.steps:
            if isinstance(step, Transfer) and step.is_send:
                sends[program.rank, step.peer].append(step.message)
            elif isinstance(step, Transfer):
                receives[step.peer, program.rank].append(step.message)
    for link in sorted(sends.keys() | receives.keys()):
        for at, (one, other) in enumerate(zip_longest(sends[link], receives[link])):
            if one != other:
                raise ScheduleError(
                    f"link {link[0]} -> {link[1]}, message {at}: sent is {one or 'nothing'}, "
                    f"received is {other or 'nothing'}; expected the same messages in the same order"
                )
    return LoweredReport(
        num_messages=sum(len(messages) for messages in sends.values()), held=where_sends_wait(lowered.programs)
    )


def _check_steps(schedule: Schedule, program: RankProgram, needs: Dependencies) -> None:
    rank = program.rank
    posted: set[Message] = set()
    done: list[Action] = []
    made: set[Action] = set()
    for position, step in enumerate(program.steps):
        where = f"rank {rank}, step {position}"
        if isinstance(step, Action | GroupStep):
            given = inputs = set(program.inputs.get(step, ()))
            if isinstance(step, Action) and step.op is not Op.U:
                inputs = {delivery.message for delivery in needs.arrivals(step)}
            if inputs != given:
                raise ScheduleError(f"{where}: {step} needs {_listed(inputs)}, but waits for other messages")
            if not inputs <= posted:
                raise ScheduleError(f"{where}: {step} needs {_listed(inputs - posted)}; expected the receive before it")
            if isinstance(step, Action):
                done.append(step)
                made.add(step)
        elif isinstance(step, Collective):
            continue  # see _check_collectives
        elif not step.is_send:
            posted.add(step.message)
        elif step.message.kind in STAGE_KINDS and (maker := needs.maker(step.message)) not in made:
            raise ScheduleError(f"{where}: {step} comes before {maker}, which makes it")
    if tuple(done) != schedule.programs[rank]:
        raise ScheduleError(f"rank {rank} no longer runs the actions of its program in their order")


def _check_collectives(lowered: Lowered) -> None:
    """Each is once on each of its ranks, after what it needs, and no two ranks begin them in opposite orders."""
    schedule = lowered.schedule
    orders = [[step for step in program.steps if isinstance(step, Collective)] for program in lowered.programs]
    everywhere = dict.fromkeys(each for own in orders for each in own)
    for rank, program in enumerate(lowered.programs):
        counts = Counter(orders[rank])
        ready = ready_positions(schedule, rank, everywhere)
        latest = latest_positions(schedule, rank, everywhere)
        done = 0
        for position, step in enumerate(program.steps):
            done += isinstance(step, Action)
            if not isinstance(step, Collective):
                continue
            if step in ready and step.op is not Op.UNSHARD and done < ready[step]:
                wanted = "whose gradient it takes" if step.op is Op.REDUCE_GRAD else "which needs the weights"
                raise ScheduleError(
                    f"rank {rank}, step {position}: {step} comes before {schedule.programs[rank][ready[step] - 1]}, "
                    f"{wanted}: expected it after the last backward of its stages"
                )
            if step in latest and done > latest[step]:
                raise ScheduleError(
                    f"rank {rank}, step {position}: {step} comes after {schedule.programs[rank][latest[step]]}, "
                    f"which needs the weights: expected it before the first use of its stage"
                )
        for each in everywhere:
            members = each.ranks(schedule.owners)
            if counts[each] != (rank in members):
                raise ScheduleError(
                    f"{each} is {counts[each]} times on rank {rank}: expected it once on each of the ranks "
                    f"{', '.join(map(str, members))}, and nowhere else"
                )
    cycle = find_cycle(orders)
    if cycle:
        lines = [f"deadlock: {len(cycle)} ranks begin collectives in orders that form a circle:"]
        lines += [f"  rank {rank} begins {first} before {then}" for rank, first, then in cycle]
        raise ScheduleError("\n".join([*lines, "expected one order for all ranks"]))


def _listed(messages: set[Message]) -> str:
    return ", ".join(map(str, sorted(messages))) or "nothing"


def _check_complete(schedule: Schedule) -> None:
    """Each (stage, microbatch) has one F, and B or I and W (neither in a forward-only program), on its owner."""
    counts: Counter[Action] = Counter()
    for rank, program in enumerate(schedule.programs):
        # U: see check_updates; moves: see find_moves.
        counts.update(action for action in program if action.op in COMPUTE_OPS)
        own = frozenset(schedule.placement[rank])
        for position, action in enumerate(program):
            stage, op, index = action
            if op in MOVE_OPS:
                continue  # see `find_moves`
            if op not in COMPUTE_OPS and op is not Op.U:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}: a compute order holds F B I W U and moves of "
                    f"activations; communication is inserted by lowering"
                )
            if stage not in own:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}: this rank holds the stages {sorted(own)}"
                )
            if op is not Op.U and not 0 <= index < schedule.total_indices:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}: {_counted(schedule)} are numbered "
                    f"0..{schedule.total_indices - 1}"
                )
            if op is not Op.U and len(schedule.owners[stage]) > 1 and schedule.owner(stage, index) != rank:
                raise ScheduleError(_of_another_rank(schedule, action, f"rank {rank}, position {position}"))
    twice = [action for action, count in counts.items() if count > 1]
    if twice:
        raise ScheduleError(f"{_some(twice)} occur more than once: expected each action once")
    _check_pairs(schedule, counts)


def _of_another_rank(schedule: Schedule, action: Action, where: str) -> str:
    stage, _, index = action
    microbatch = index // schedule.num_slices
    fitting = fitting_owners(schedule)
    expected = "Expected that; no order of its ranks fits these programs"
    if fitting not in (None, schedule.owners):
        expected = (
            f"Expected that, or other owners declared: owners={fitting} fit these programs "
            f'(an argument of Schedule and from_csv; "owners" in JSON)'
        )
    return (
        f"{action} on {where}: microbatch {microbatch} of stage {stage} belongs to rank "
        f"{schedule.owner(stage, index)}, since microbatches go round its owners {schedule.owners[stage]}. {expected}"
    )


def _check_pairs(schedule: Schedule, counts: Counter[Action]) -> None:
    has_backward, trains = schedule.has_backward, schedule.trains
    missing: list[str] = []
    for stage in range(schedule.num_stages):
        for k in range(schedule.total_indices):
            if (stage, "F", k) not in counts:
                missing.append(str(Action(stage, Op.F, k)))
            if not has_backward:
                continue
            if not trains(stage):
                surplus = next((op for op in "BIW" if (stage, op, k) in counts), None)
                if surplus is not None:
                    raise ScheduleError(
                        f"{stage}{surplus}{k}: stage {stage} runs without a backward "
                        f"(without_backward={schedule.without_backward}): expected its forwards alone"
                    )
                continue
            whole, input_grad, weight_grad = ((stage, op, k) in counts for op in "BIW")
            if whole and (input_grad or weight_grad):
                raise ScheduleError(f"{stage}B{k} occurs alongside {stage}I{k} or {stage}W{k}: expected B, or I and W")
            if not whole and not (input_grad and weight_grad):
                lacking = "I" if weight_grad else "W" if input_grad else "B"
                missing.append(f"{stage}{lacking}{k}")
            if len(missing) > _MOST_SHOWN:  # one mistyped index makes millions
                break
    if missing:
        raise ScheduleError(
            f"missing: {_some(missing)}. Each of the {schedule.num_stages} stages needs F and B (or I and W) "
            f"of each of the {schedule.total_indices} {_counted(schedule)}{_declared(schedule)}"
        )


def _declared(schedule: Schedule) -> str:
    ops = {(stage, op) for program in schedule.programs for stage, op, _ in program}
    alone = [
        s for s in range(schedule.num_stages - 1) if schedule.trains(s) and {o for t, o in ops if t == s} == {Op.F}
    ]
    if not alone or not schedule.has_backward:
        return ""
    return f"; stages that run under no gradient are declared: Schedule(without_backward={tuple(alone)})"


def _check_acyclic(schedule: Schedule) -> None:
    """Runs all programs without time; a rank that does not reach its end is part of a cycle or waits for one."""
    needs = Dependencies(schedule)
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        program = schedule.programs[rank]
        at = position[rank]
        while at < len(program):
            action = program[at]
            lacking = next((need for need in needs.of(action) if need not in done), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(rank)
                break
            done.add(action)
            if waiting:
                runnable += waiting.pop(action, ())
            at += 1
        position[rank] = at
    stuck = [rank for rank, program in enumerate(schedule.programs) if position[rank] < len(program)]
    if stuck:
        raise ScheduleError(_describe_cycle(schedule, needs, done, position, stuck[0]))


def _describe_cycle(schedule: Schedule, needs: Dependencies, done: set[Action], position: list[int], rank: int) -> str:
    path: list[tuple[int, Action, Action]] = []  # (rank, its next action, the action it waits for)
    while rank not in [r for r, _, _ in path]:
        action = schedule.programs[rank][position[rank]]
        need = next(n for n in needs.of(action) if n not in done)
        path.append((rank, action, need))
        rank = needs.rank(need)
    cycle = path[[r for r, _, _ in path].index(rank) :]
    alone = len(cycle) == 1
    waiting = "rank, which needs what it runs later" if alone else "ranks, each waiting for the next"
    lines = [f"deadlock: a cycle of {len(cycle)} {waiting}:"]
    for r, action, need in cycle:
        program, at = schedule.programs[r], position[r]
        nearby = " ".join(f"[{a}]" if a == action else str(a) for a in program[max(0, at - 2) : at + 3])
        other = needs.rank(need)
        lines.append(
            f"  rank {r} at position {at} ({nearby}) waits for {need}, "
            f"at position {schedule.programs[other].index(need)} of rank {other}"
        )
    _, action, need = cycle[0]
    lines.append(
        f"move {need} before {action}" if alone else f"move {need} before what waits for it, or {action} later"
    )
    return "\n".join(lines)


def _counted(schedule: Schedule) -> str:
    return "microbatches" if schedule.num_slices == 1 else "slices"


def _some(items: list[str] | list[Action]) -> str:
    shown = ", ".join(str(item) for item in items[:_MOST_SHOWN])
    return shown if len(items) <= _MOST_SHOWN else f"{shown} and more"
