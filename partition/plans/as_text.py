"""A plan as tables for people: stages, memory, and what the runners-up lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ...schedules.ir import Op
from ...schedules.timing.costs import by_stage
from ...schedules.wording import count, duration, size, wrapped
from ..memory import MemoryUse
from ..stage_cost import message_seconds
from .as_schedule import sampled
from .record import NOT_SEARCHED, OWN, PlanRecord, RunnerUp, Searched

CHOSEN = "chosen: "  # begins the note that names the planner's choice
NEAR = 0.02  # of the least time: by so much predictions are not told apart
MAX_ROWS = 24  # of a table; of longer ones the first and the last ENDS are shown
ENDS = 8


def explain(plan: PlanRecord) -> str:
    """The choice, a table of the stages, memory by rank, the runners-up with what each loses, then the notes. Of more
    than MAX_ROWS rows the first and last ENDS; `Plan.to_json` has all."""
    chosen = [note.removeprefix(CHOSEN) for note in plan.notes if note.startswith(CHOSEN)]
    slowest = "slowest rank" if plan.num_chunks > 1 else "slowest stage"
    lines = [
        *chosen,
        f"{describe(plan)}: its {slowest} takes {duration(plan.bottleneck)} a microbatch; the least "
        f"bottleneck of any plan is at least {duration(plan.bound)}",
    ]
    if plan.simulated_step_time is not None:
        lines.append(
            f"simulated, {plan.schedule}, {count(plan.num_microbatches or 0, 'microbatch')}: "
            f"{duration(plan.simulated_step_time)} a batch, bubble {plan.bubble:.1%}"
        )
        if plan.num_microbatches is not None and (varied := sampled(plan)) is not None:
            known = "the trial" if plan.tried_seconds is not None else "the profile"
            lines.append(f"predicted, with actions that vary as in {known}: {varied}, bubble {varied.bubble:.1%}")
    lines += _runtime(plan)
    lines += _stages(plan)
    lines += _folded(_replicas(plan), "stages")
    lines += _memory(plan)
    for each in plan.runners_up:
        lines.append(f"runner-up {each.label or '-'.join(map(str, each.replicas))}: {_loss(plan, each)}")
    if plan.searched is not None and plan.simulated_step_time is not None:
        lines += [*plan.searched.lines(plan.simulated_step_time), *_in_short(plan, plan.searched, chosen)]
    return wrapped("\n".join([*lines, *(f"note: {note}" for note in plan.notes if not note.startswith(CHOSEN))]))


def _in_short(plan: PlanRecord, searched: Searched, chosen: Sequence[str]) -> list[str]:
    """A sentence each: what was chosen, why, what came close, and what was not searched."""
    least = plan.simulated_step_time or 0.0
    near = [each for each in plan.runners_up if (each.simulated_step_time or math.inf) <= (1 + NEAR) * least]
    more = f", and {len(near) - 1} more" if len(near) > 1 else ""
    close = f"none of the runners-up is within {NEAR:.0%}"
    if near:
        seconds = _more(near[0].simulated_step_time or 0.0, least)
        close = f"{near[0].label} ({seconds}){more} within {NEAR:.0%}, which only a trial can tell apart"
    return [
        f"in short: {'; '.join(chosen) or describe(plan)}, {duration(least)} a batch",
        f"why: fastest of {count(searched.simulated, 'configuration')} that were simulated; its ranks wait for "
        f"{plan.bubble:.0%} of a step",
        f"close: {close}",
        "not searched: schedules that were not asked for, and the "
        f"{len(NOT_SEARCHED) - 1} kinds of layouts named above",
    ]


def describe(plan: PlanRecord) -> str:
    """The shape of a plan in half a line.

    >>> from stagewright.partition import Cluster, Node, Profile, partition
    >>> nodes = [Node(name=n, forward_seconds=1, backward_seconds=2) for n in "abc"]
    >>> describe(partition(Profile(nodes=nodes), Cluster.from_levels([(3, 1e9)]), straight=True))
    '1-1-1 on 3 devices'
    """
    counts = [plan.replicas[s] for s in plan.firsts]
    config = "-".join(map(str, counts)) if 1 < len(counts) <= 16 else count(len(counts), "stage")
    config += f" with {counts[0]} replicas" if len(counts) == 1 < counts[0] else ""
    tensor = [plan.stages[s].tensor // plan.context for s in plan.firsts]
    parts = [f"{config} on {count(plan.num_devices, 'device')}"]
    if plan.num_chunks > 1:
        parts.append(f"{'up to ' if plan.schedule == OWN else ''}{plan.num_chunks} chunks a rank")
    if max(tensor) > 1:
        parts.append(f"tensors over {'-'.join(map(str, tensor)) if len({*tensor}) > 1 else tensor[0]}")
    parts += [f"sequences over {plan.context}"] if plan.context > 1 else []
    parts += [f"experts over {plan.expert}"] if plan.expert > 1 else []
    parts += ["forwards and backwards in pairs"] if plan.overlaps else []
    if plan.microbatch_size is not None:
        parts.append(f"microbatches of {plan.microbatch_size}")
    if plan.slice_lengths:
        parts.append(f"slices of {'-'.join(map(str, plan.slice_lengths))} tokens")
    if plan.cost_model == "pipedream":
        parts.append("by PipeDream's own cost model")
    return ", ".join(parts)


_USUAL = {  # of a stage: what is said where it is another
    "recompute": ("recompute", "none"),
    "tensor": ("tensor", 1),
    "optimizer_shards": ("shards", 1),
    "split_summary": ("nodes", ""),
}
_STRUCTURES = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "buffers": "buffers",
    "activations": "activ.",
    "workspace": "worksp.",
    "communication": "comm.",
}
_WIDTH = 80  # of a terminal


def _runtime(plan: PlanRecord) -> list[str]:
    """Seconds that the runtime takes of a rank, where the plan knows them."""
    costs, number = plan.costs, len(plan.stages)
    action = max(by_stage(costs.overhead, number))
    message = max(message_seconds(by_stage(costs.message_overhead, number)))
    if not (action or message or costs.around or costs.norm):
        return []
    parts = [f"{duration(action)} around each action"]
    parts += [f"{duration(message)} at either end of a message"] if message else []
    parts += [f"{duration(costs.around)} around each step"] if costs.around else []
    parts += [f"{duration(costs.norm)} for the norm of all gradients"] if costs.norm else []
    return [f"runtime: {', '.join(parts)}"]


def _folded(rows: list[str], what: str) -> list[str]:
    if len(rows) <= MAX_ROWS:
        return rows
    return [*rows[:ENDS], f"  ... {len(rows) - 2 * ENDS} more {what}, in the plan's JSON ...", *rows[-ENDS:]]


def _stages(plan: PlanRecord) -> list[str]:
    """A row a stage; its units, and what not every stage has, below it where lines would be too long."""
    rows, units = [], []
    actions = zip(plan.seconds(Op.F), plan.seconds(Op.B), strict=True)
    for number, (stage, (forward, backward)) in enumerate(zip(plan.stages, actions, strict=True)):
        memory = "-" if stage.memory is None else size(stage.memory.total)
        flight = "-" if stage.in_flight is None else str(stage.in_flight)
        seconds = "".join(f"{each * 1e3:9.3f}" for each in (forward, backward, stage.step_seconds))
        rows.append(f"{number:5}  {_span(stage.ranks):<7}{seconds}  {flight:>9} {memory:>9}")
        names = " .. ".join(dict.fromkeys((stage.nodes[0], stage.nodes[-1])))
        values = {name: getattr(stage, name) for name in _USUAL} | {"tensor": stage.tensor // plan.context}
        own = [f"{said} {values[name]}" for name, (said, usual) in _USUAL.items() if values[name] != usual]
        units.append(", ".join([names, *own]))
    fit = max(len(row) + len(names) for row, names in zip(rows, units, strict=True)) + 2 <= _WIDTH
    table = [f"{row}{'  ' if fit else chr(10) + ' ' * 7}{names}" for row, names in zip(rows, units, strict=True)]
    head = "stage  ranks       F ms     B ms  step ms  in flight    memory"
    return [f"{head}{'  units' if fit else ''}", *_folded(table, "stages")]


def _replicas(plan: PlanRecord) -> list[str]:
    """Stages whose replicas differ, as a trial measured them; equal ones once."""
    rows: dict[tuple[tuple[int, ...], str], list[int]] = {}
    pairs = zip(plan.replica_seconds(Op.F), plan.replica_seconds(Op.B), strict=True)
    for number, (stage, (forward, backward)) in enumerate(zip(plan.stages, pairs, strict=True)):
        whole = fmean(forward) + fmean(backward)
        if max(len(forward), len(backward)) > 1 and whole > 0:
            replicas = range(stage.replicas)
            ratios = [(forward[r % len(forward)] + backward[r % len(backward)]) / whole for r in replicas]
            shown = ", ".join(f"{each:.2f}" for each in ratios[:ENDS])
            more = f" ... (the most {max(ratios):.2f})" if len(ratios) > ENDS else ""
            rows.setdefault((stage.ranks, shown + more), []).append(number)
    return [
        f"replicas of {'stage' if len(own) == 1 else 'stages'} {', '.join(map(str, own))} on ranks {_span(ranks)} "
        f"take {shown} times these F and B"
        for (ranks, shown), own in rows.items()
    ]


def _memory(plan: PlanRecord) -> list[str]:
    """Rows of memory by data structure; equal ranks once."""
    rows: dict[MemoryUse, list[int]] = {}
    for rank, memory in sorted(plan.memory.items()):
        rows.setdefault(memory, []).append(rank)
    if not rows:
        return []
    head = "".join(f"{name:>9}" for name in (*_STRUCTURES.values(), "total"))
    table = []
    for memory, ranks in rows.items():
        figures = [*(getattr(memory, name) for name in _STRUCTURES), memory.total]
        table.append(f"{_span(ranks):<7}" + "".join(f"{each / 1e6:9.{3 if each < 1e9 else 0}f}" for each in figures))
    return ["memory by rank, in MB", f"{'ranks':<7}{head}", *_folded(table, "kinds of ranks")]


def _loss(plan: PlanRecord, other: RunnerUp) -> str:
    predicted = f"{duration(other.bottleneck)} a microbatch"
    memory = "" if other.memory_bytes is None else f"; {size(other.memory_bytes)}"
    if other.simulated_step_time is None or plan.simulated_step_time is None:
        return f"{predicted}, {_more(other.bottleneck, plan.bottleneck)}{memory}"
    return (
        f"{predicted}; simulated {duration(other.simulated_step_time)} a batch, "
        f"{_more(other.simulated_step_time, plan.simulated_step_time)}{memory}"
    )


def _more(seconds: float, least: float) -> str:
    return f"{seconds / least - 1:+.2%}" if least > 0 else "-"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    in_a_row = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if in_a_row else f"{len(ranks)} ranks"
