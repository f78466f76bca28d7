"""Plans made from measurements and run on the same ranks; and cuts of uneven models, in turn.

planned    profile and links measured -> plan -> the same ranks run it: predicted against measured
regret     the planner's best few plans, each run: how much slower the chosen one is than the fastest
memory     the same plan in new processes: peak growth of resident memory against the plan's
auto       schedule="auto" compared with the best of torch's pipelines and with its DDP
cuts       one model under one schedule, cut in three ways in turn
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...cli.host import MemoryMeter
from ...cli.train.gpt import GPTConfig
from ...cli.train.pipeline import first, gather
from ...partition import Cluster, Node, Profile, partition, plan
from ...partition.plans.as_text import describe
from ...partition.plans.plan import Plan
from ...partition.profiler import profile_model
from ...schedules import Op, simulate
from ...schedules.wording import size
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Judged, Target, repeated
from ..measure.models import (
    GPT_MICROBATCH,
    GPT_SIZE,
    Problem,
    StagesProblem,
    WholeProblem,
    Workload,
    gpt_problem,
    image_problem,
    sleeping_layers,
)
from ..measure.sides import TIMEOUT, WARM_UP_STEPS, DataParallelSide, OurSide, Side, TorchSide, warm_up
from ..measure.sleeping import sleeping_side
from ..measure.suite import layered
from ..measure.timing import compared, in_turn, median_of, off, say, timed, typical
from .zero_bubble import THEIRS

_MEMORY_STEPS = 4  # the first makes the optimizer's state
_BY_PROFILE = "profile"


def plan_by_measuring(
    problem: WholeProblem, *, num_microbatches: int | None, trials: int = 0, **restrictions: Any
) -> tuple[Plan, Plan]:
    """The plan of schedule="auto" for a given M, or any, within `restrictions` of the planner's search; and the plan as
    predicted before any trials. Collective over the processes; the same plans on each."""
    from ...pipe.auto.layout import plan_here  # imports the profiler and the planner, which other jobs don't need

    return plan_here(
        problem.make_model(),
        ((problem.inputs,), problem.target),
        num_microbatches=num_microbatches,
        timeout=TIMEOUT,
        trials=trials,
        restrictions=restrictions,
        loss_fn=problem.loss_fn,
        optimizer=problem.optimizer,
    )


def planned_problem(case: Case) -> WholeProblem:
    """`model` "gpt", traced as a whole, with AdamW, or "sleep": layers that sleep for unequal times; of `layers`."""
    M = case.count("microbatches")
    if case.text("model") == "sleep":
        return sleeping_layers(case.count("layers"), M)
    size = GPTConfig(layers=case.count("layers"), width=GPT_SIZE.width, length=GPT_SIZE.length)
    return gpt_problem(size, batch=M * GPT_MICROBATCH)


def planned(case: Case, repetitions: int) -> Iterator[Figure]:
    """Error of a plan's step. With a `folder` rank 0 writes the plan there, for `memory`.

    `replicas` "free": the planner may choose any, including unequal ones; else "none". `limit`: of the error. `steps`:
    of a repetition, whose value is their median.
    """
    problem, name = planned_problem(case), f"{case.text('case')} {_described(case)}"
    say(f"{name}: profiling and planning")
    restrictions: dict[str, Any] = {} if case.text("replicas") == "free" else {"data_sizes": (1,)}
    plan, _ = plan_by_measuring(problem, num_microbatches=case.count("microbatches"), **restrictions)
    predicted = plan.simulated_step_time
    assert predicted is not None
    if dist.get_rank() == 0 and "folder" in case:
        _plan_file(case).write_text(plan.to_json(), encoding="utf-8")
    shape = f"{plan.schedule} {describe(plan)}"
    say(f"{name}: {shape}")
    side = OurSide.of_model(problem, schedule=plan)
    for _ in range(WARM_UP_STEPS):
        timed(side.step)
    side.pipe.forget_measurements()
    makespans: list[float] = []
    runs = {"measured": partial(median_of, side.step, case.count("steps", 1))}
    seconds = in_turn(name, runs, repetitions=repetitions, after=lambda: makespans.append(side.timeline.makespan))
    measured = seconds["measured"]
    costs, schedule = side.pipe.measured_costs(), side.pipe.schedule
    table = costs.table(num_stages=schedule.num_stages)
    side.pipe.close()
    work = sum(table.means(Op.F)) + sum(table.means(Op.B))
    more = work / (sum(plan.seconds(Op.F)) + sum(plan.seconds(Op.B))) - 1
    how = How.EMULATED if case.text("model") == "sleep" else How.MEASURED
    yield from repeated(measured, case=Case.of({"run": _described(case)}), name="step", unit="s", how=how)
    yield from off(
        predicted,
        measured,
        case=_shown(case),
        name="error of the step",
        how=how,
        target=Target(limit=case.number("limit")),
        note=f"; F and B took {more:+.1%}; makespan {typical(makespans)}, simulated from its own costs "
        f"{simulate(schedule, costs).makespan * 1e3:.2f}; {shape}",
    )


def regret(case: Case, repetitions: int) -> Iterator[Figure]:
    """How much slower the chosen plan is than the fastest of the best few, each run with stages that sleep; the layers'
    seconds are random numbers of a `seed`, 2 to 12 ms."""
    chance, ranks = random.Random(case.count("seed")), dist.get_world_size()
    forward = [chance.uniform(2e-3, 12e-3) for _ in range(case.count("layers"))]
    nodes = [Node(name=f"layer {i}", forward_seconds=f, backward_seconds=2 * f) for i, f in enumerate(forward)]
    others: list[Plan] = []
    chosen = plan(
        Profile(nodes=tuple(nodes)),
        Cluster.parse(f"{ranks}:net=1GB/s@50us"),
        global_batch=case.count("microbatches"),
        schedules=("1f1b", "interleaved", "gpipe"),
        data_sizes=(1,),
        pipeline_sizes=(ranks,),
        num_runners_up=4,
        on_runners_up=others.extend,
    )
    if len(others) < 4:
        raise ValueError(f"{case.count('layers')} layers have {1 + len(others)} plans: expected 5, as 20 layers have")
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        for number, each in enumerate((chosen, *others)):
            side = sleeping_side(each.build_schedule(), each.costs)
            stack.enter_context(side.pipe)
            runs[f"{number}: {each.schedule} V={each.num_chunks}"] = partial(_batch_seconds, side.step, 2)
        for run in runs.values():  # connects groups, finds shapes
            run()
        seconds = in_turn(f"{case.text('case')} seed {case.count('seed')}", runs, repetitions=repetitions)
    typically = [median(each) for each in seconds.values()]
    yield Figure(
        case=Case.of({"case": case.text("case"), "run": f"{ranks} ranks, seed {case.count('seed')}"}),
        name="regret of the chosen plan",
        value=typically[0] / min(typically) - 1,
        unit="error",
        how=How.EMULATED,
        target=Target(limit=case.number("limit")),
        note="; ".join(f"{key} {value * 1e3:.1f} ms" for key, value in zip(seconds, typically, strict=True)),
    )


def _batch_seconds(step: Callable[[], object], number: int) -> float:
    """Seconds per batch of a number in a row, from this rank's return from one step to its last return."""
    step()
    began = time.perf_counter()
    for _ in range(number):
        step()
    return (time.perf_counter() - began) / number


def memory(case: Case, repetitions: int) -> Iterator[Figure]:
    """Error of a plan's memory, by rank, in a few steps of the plan in `folder`, in new processes.

    `kind` "in use": malloc returns freed memory to the system at once, as the plan assumes; "resident": malloc's
    default, which keeps some of it. A tiny model runs before the meter starts, since memory that torch allocates for
    the first model is not in the plan.
    """
    del repetitions
    plan = Plan.load(_plan_file(case))
    say(f"{case.text('case')} {_described(case)}: memory {case.text('kind')}")
    for rank, peak in enumerate(resident_peaks(lambda: OurSide.of_model(planned_problem(case), schedule=plan))):
        predicted = plan.memory_bytes.get(rank, 0.0)
        yield Figure(
            case=_shown(case),
            name=f"error of rank {rank}'s peak, {case.text('kind')}",
            value=predicted / peak - 1,
            unit="error",
            how=How.MEASURED,
            target=Target(limit=case.number("limit")) if "limit" in case else None,
            note=f"{size(predicted)} / {size(peak)}",
        )


def resident_peaks(make: Callable[[], OurSide]) -> tuple[int, ...]:
    """By rank, growth of resident memory in a few steps [bytes], in new processes.

    A step of a tiny GPT runs first, which loads modules, threads and tables.
    """
    tiny = gpt_problem(GPTConfig(layers=dist.get_world_size(), width=16, length=8), batch=4)
    first = OurSide.of_model(tiny, schedule="1f1b", num_microbatches=4)
    first.step()
    first.pipe.close()
    gc.collect()
    meter = MemoryMeter()
    side = make()
    for _ in range(_MEMORY_STEPS):
        side.step()
    peaks = gather(meter.peak())
    side.pipe.close()
    return peaks


def auto(case: Case, repetitions: int) -> Iterator[Figure]:
    """Steps of the best of torch's pipelines, and of its DDP, over that of schedule="auto", all in turn.

    A batch has `microbatches` of `samples` samples, which the plan may divide otherwise. Torch's stages are cut by our
    profiler's seconds.
    """
    P, M, samples = case.count("ranks"), case.count("microbatches"), case.count("samples")
    problem = layered(case.text("model"), M * samples)
    name = f"{case.text('model')} P={P} M={M}"
    chosen, _ = plan_by_measuring(problem, num_microbatches=None, trials=3)
    say(f"{name}: {describe(chosen)}")
    sides: dict[str, Side] = {"auto": OurSide.of_model(problem, schedule=chosen), "DDP": DataParallelSide(problem)}
    cuts = {V: _equal_cut(problem, P * V, samples) for V in (1, 2)}
    for theirs in THEIRS:
        schedule = theirs.removeprefix("torch ")
        V = 1 if schedule in ("gpipe", "1f1b") else 2
        workload = Workload(model="gpt", schedule=schedule, num_ranks=P, num_microbatches=M, num_chunks=V)
        sides[theirs] = TorchSide(workload, _in_stages(problem, cuts[V]))
    for _ in range(WARM_UP_STEPS):
        for side in sides.values():
            timed(side.step)
    seconds = in_turn(name, {who: partial(timed, side.step) for who, side in sides.items()}, repetitions=repetitions)
    own = seconds.pop("auto")
    best = min((who for who in THEIRS), key=lambda who: median(seconds[who]))
    for who in ("DDP", best):
        yield from compared(
            (seconds[who], own),
            case=Case.of({"case": case.text("case"), "run": name}),
            name=f"step, {'DDP' if who == 'DDP' else 'best of torch'} / auto",
            how=How.MEASURED,
            target=Target(limit=1.0, at_least=True),
            note=f"; {who} / {chosen.schedule}, {describe(chosen)}",
        )


def _equal_cut(problem: WholeProblem, num_stages: int, samples: int) -> list[int]:
    found: list[int] = []
    if dist.get_rank() == 0:
        model = problem.make_model()
        profile = profile_model(
            model, (problem.inputs[:samples],), loss_fn=problem.loss_fn, target=problem.target[:samples]
        )
        cut = partition(profile, Cluster.from_levels([(num_stages, 1e12)]), straight=True, num_microbatches=8)
        found = [int(stage.nodes[0]) for stage in cut.stages]
    return [*first(found), sum(1 for _ in problem.make_model().children())]


def _in_stages(problem: WholeProblem, cut: Sequence[int]) -> StagesProblem:
    model = problem.make_model()
    assert isinstance(model, nn.Sequential)
    return StagesProblem(
        stages=[model[start:end] for start, end in pairwise(cut)],
        boundary=torch.zeros(0),
        **{each.name: getattr(problem, each.name) for each in fields(Problem)},
    )


def _plan_file(case: Case) -> Path:
    return Path(case.text("folder")) / f"{case.text('model')}-{case.count('ranks')}-{case.text('replicas')}.plan.json"


def _shown(case: Case) -> Case:
    return Case.of({"case": case.text("case"), "run": _described(case), "predicted": "planned"})


def _described(case: Case) -> str:
    model = "GPT" if case.text("model") == "gpt" else f"{case.count('layers')} layers that sleep"
    replicas = ", replicas free" if case.text("replicas") == "free" else ""
    return f"{model} P={case.count('ranks')} M={case.count('microbatches')}{replicas}"


def contest_problem(case: Case) -> WholeProblem:
    """`model` "cnn": early layers are slow, late ones hold the parameters; "gpt": a large vocabulary.

    `size`: height and width of an image, or length of a sequence; `samples`: of a microbatch.
    """
    batch, size = case.count("microbatches") * case.count("samples"), case.count("size")
    if case.text("model") == "cnn":
        return image_problem(size, batch=batch)
    return gpt_problem(GPTConfig(vocabulary=8192, width=256, layers=6, length=size), batch=batch)


def cuts(case: Case, repetitions: int) -> Iterator[Figure]:
    """One uneven model under 1F1B: step time of the other cuts over the profile's, all in turn.

    `cut`: the first module of the second stage if both have equally many layers.
    """
    problem, M = contest_problem(case), case.count("microbatches")
    model = {"cnn": "CNN, wide linear layers behind", "gpt": "GPT, large vocabulary"}[case.text("model")]
    name = f"{model} 1f1b P={case.count('ranks')} M={M}"
    say(f"{name}: profiling and planning")
    plan, _ = plan_by_measuring(
        problem,
        num_microbatches=M,
        schedules=("1f1b",),
        pipeline_sizes=(case.count("ranks"),),
        data_sizes=(1,),
        recompute=("none",),
    )
    assert plan.simulated_step_time is not None
    by_hand = {"schedule": "1f1b", "num_microbatches": M}
    sides = {
        "equal layers": OurSide.of_model(problem, cut=[case.text("cut")], **by_hand),
        "equal parameters": OurSide.of_model(problem, **by_hand),  # PipelineModule's own choice
        _BY_PROFILE: OurSide.of_model(problem, schedule=plan),
    }
    warm_up(name, sides)
    runs = {cut_by: partial(median_of, side.step, case.count("steps")) for cut_by, side in sides.items()}
    seconds = in_turn(name, runs, repetitions=repetitions)
    stages = {cut_by: " | ".join(side.pipe.stage_names) for cut_by, side in sides.items()}
    for side in sides.values():
        side.pipe.close()
    own = seconds.pop(_BY_PROFILE)
    for cut_by, values in seconds.items():
        yield from compared(
            (values, own),
            case=Case.of({"case": case.text("case"), "run": name}),
            name=f"step, {cut_by} / profile",
            how=How.MEASURED,
            target=Target(limit=1.0, at_least=True, judged=Judged.WORST),  # faster only if every repetition was
            note=f" (planned {plan.simulated_step_time * 1e3:.2f}); {stages[cut_by]} / {stages[_BY_PROFILE]}",
        )
