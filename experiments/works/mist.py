"""Iterations of measured uneven plans, simulated from each plan's own seconds of work and its link. No torch.

The check is on waits: who waits for whom, and for how long, is what the simulator has to say. Of a rank's timers (see
`mist_plans`) it is given

    forward, backward   over the number of microbatches
    allreduce           of the stage's rank with the least: the others' contain waits for it
    embedding           of the two ends, the least: the one that is there first waits for the other
    update              of the two ends, the larger: these are through with the embeddings last, so that they do not
                        wait for the norm, while the ranks between them do
    send                of the warm-up, for seconds of a message: `mist_links`

and not the iteration, nor the other sends and receives, which say how long a rank waited.

Aceso's engine computes nothing while it communicates: behind a forward a rank exchanges the activation for a gradient
with the next stage, behind a backward the gradient for an activation with the one before. So each action is as long as
its exchange longer. Of GPUs without a link of their own (L4, A10G) all bytes go through the host's memory, one message
after the other (github.com/NVIDIA/nccl issue 384): an exchange takes as long as both. NVLink, and the network between
nodes, carry both at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from ...schedules import Costs, Timeline, build, simulate
from ..jobs.case import Case
from ..jobs.figure import Figure, How
from . import mist_memory
from .mist_links import bandwidth, between_nodes, message_seconds
from .mist_messages import message_behind
from .mist_plans import MeasuredPlan, Rank, Stage, measured, path_of

_OWN_LINKS = ("a100", "h100", "v100-sxm")  # GPUs that reach each other without the host's memory
_RATIO, _LEFT_OUT = "simulated / measured", "left out"
_OFF = 0.015  # of an iteration: rows beyond are named


def simulate_plans(case: Case, repetitions: int) -> Iterator[Figure]:
    """Iteration of each plan of a file, simulated and measured.

    Case: `plans`, as `path_of` has it.
    """
    del repetitions
    found = measured(path_of(case))
    for number, plan in enumerate(found.plans, 1):
        own = case.also(
            number=number,
            model=plan.model,
            platform=plan.platform,
            stages=len(plan.stages),
            ranks=sum(len(stage.ranks) for stage in plan.stages),
        )
        seconds = simulated(plan, bandwidth(plan.platform, path_of(case))).batch_seconds
        for how, value in ((How.PUBLISHED, plan.seconds), (How.SIMULATED, seconds)):
            yield Figure(case=own, name="iteration", value=value, unit="s", how=how)
        ratio = seconds / plan.seconds
        yield Figure(case=own, name=_RATIO, value=ratio, unit="ratio", how=How.SIMULATED)
    if found.incomplete:
        note = "; ".join(found.incomplete)
        yield Figure(case=case, name=_LEFT_OUT, value=len(found.incomplete), unit="", how=How.PUBLISHED, note=note)


def findings(figures: Sequence[Figure]) -> Iterator[str]:
    """How far iterations and peaks of memory are off, which most, and what could not be simulated."""
    yield from _of_iterations({_named(figure): figure.value for figure in figures if figure.name == _RATIO})
    yield from mist_memory.findings(figures)
    yield from (
        f"Left out, since rows of ranks are missing: {each.note}." for each in figures if each.name == _LEFT_OUT
    )


def _of_iterations(ratios: Mapping[str, float]) -> Iterator[str]:
    off = {name: abs(ratio - 1) for name, ratio in ratios.items()}
    if not off:
        return
    mean, most = fmean(off.values()), max(off.values())
    yield f"Iterations are off by {mean:.1%} on average, {most:.1%} at most ({len(off)} plans)."
    beyond = [f"{name} ({ratios[name] - 1:+.1%})" for name, value in off.items() if value > _OFF]
    if beyond:
        yield (
            f"Beyond {_OFF:.1%}: {', '.join(beyond)}. Where most bytes cross a cut (inside of an MLP, next to a stage "
            "of two ranks), the seconds of an exchange count most, and these are the least known."
        )


def _named(figure: Figure) -> str:
    case = figure.case
    return f"{case.text('model')} on {case.text('platform')} in {case.count('stages')} stages"


def simulated(plan: MeasuredPlan, bytes_per_second: float) -> Timeline:
    """The iteration, from the seconds that the module lists."""
    S, M = len(plan.stages), plan.num_microbatches
    messages = message_seconds(plan, bytes_per_second)
    behind = [_exchanges(plan, stage, messages[stage], bytes_per_second) for stage in range(S - 1)]
    first, last = plan.stages[0], plan.stages[-1]
    update = max(_least(first, "update"), _least(last, "update"))
    tied = (((0, S - 1), min(_least(first, "embedding"), _least(last, "embedding"))),) if S > 1 else ()
    alone = _least(first, "embedding") if S == 1 else 0.0
    to_next = [*(here for here, _ in behind), 0.0]
    to_previous = [0.0, *(there for _, there in behind)]
    costs = Costs(
        forward=[_mean(stage, "forward") / M + more for stage, more in zip(plan.stages, to_next, strict=True)],
        backward=[_mean(stage, "backward") / M + more for stage, more in zip(plan.stages, to_previous, strict=True)],
        update=[_least(stage, "allreduce") + alone + update for stage in plan.stages],
        tied=tied,
        norm=0.0,
    )
    return simulate(build("1f1b", num_ranks=S, num_microbatches=M), costs)


def _exchanges(plan: MeasuredPlan, stage: int, seconds: float, bytes_per_second: float) -> tuple[float, float]:
    """Seconds that the stage before a cut, and the one behind it, take to send one message and receive another."""
    at_once = between_nodes(plan, stage) or plan.platform.lower().startswith(_OWN_LINKS)
    message, both = message_behind(plan, stage), seconds if at_once else 2 * seconds
    return both + message.gathered_before / bytes_per_second, both + message.gathered_behind / bytes_per_second


def _least(stage: Stage, name: str) -> float:
    return min(_of(rank, name) for rank in stage.ranks)


def _mean(stage: Stage, name: str) -> float:
    return fmean(_of(rank, name) for rank in stage.ranks)


def _of(rank: Rank, name: str) -> float:
    return float(getattr(rank, name))
