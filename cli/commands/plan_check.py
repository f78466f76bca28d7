"""`stagewright plan --check RUN`: compares a plan with the run's measurement, by cause; lists what to measure again.

stagewright plan --check gpt                              with the plan of the run
stagewright plan --check runs/gpt plan.json -o check.png  with the plan of a file
stagewright plan --check hostA/runs/gpt hostB/runs/gpt    folders of one run from several hosts
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ...partition import Plan
from ...schedules import Change
from ...schedules.explain.prediction import InputCheck, PredictionCheck
from ...schedules.timing.costs import by_stage
from ...schedules.timing.inputs import Cause
from ...schedules.timing.sampling import SHARE
from ...schedules.wording import count, duration, size, wrapped
from ...viz import write_figure
from ...viz.figures import WATERFALL, waterfall_figure
from ..options import plain_help, read
from ..tables import console, signed
from ..tables import table as new_table
from ..train.options import DEFAULT_CLIP
from .checked_run import CheckedRun, check_run
from .outputs import PICTURES, PictureOptions

if TYPE_CHECKING:
    from rich.table import Table

_MOST_ROWS = 24  # of a table: of more inputs those with the most seconds, of more ranks the first and last ones
_OF_LINKS = ("message", "sum", "held", "gather")
_FAR = 1_000  # times as long as planned: more says nothing
_GPT = ("layers", "width", "heads", "length")
_OWN = ("model", "data", "loss", "optimizer")


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(PictureOptions):
    """Compare a plan with the run that carried it out: the causes of the difference between the steps, and which inputs
    of the plan to measure again."""

    # The run (folder or name, or its folders from several hosts), and the plan's file if it is not the run's own.
    check: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [PLAN]")]
    # Picture of the causes between the simulated and the measured step: .png, .svg, .pdf; may be repeated.
    out: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-o"])] = ()
    json: tyro.conf.FlagCreatePairsOff[bool] = False  # Print one JSON object.


def run(argv: Sequence[str]) -> int:
    options = read(CheckOptions, argv, "plan --check RUN")
    options.check_output(options.out, sources=options.check, suffixes=PICTURES)
    style = options.style(width=WATERFALL.width)
    found = check_run(options.check)
    for path in options.out:
        write_figure(waterfall_figure(found.check, title=heading(found), style=style), path)
    if options.json:
        print(json.dumps(as_json(found) | {"written": list(map(str, options.out))}))
        return 0
    table(found)
    for path in options.out:
        print(path)
    return 0


def as_json(found: CheckedRun) -> dict[str, object]:
    check = found.check
    return {
        "run": found.name,
        "simulated": check.predicted,
        "measured": check.measured,
        "step_seconds": check.step_seconds,
        "num_steps": check.num_steps,
        "causes": [each._asdict() | {"change": each.seconds} for each in check.causes],
        "inputs": [
            {
                "name": str(each.what),
                "cause": each.what.cause,
                "kind": each.what.kind,
                "at": list(each.what.at),
                **{key: value for key, value in each._asdict().items() if key != "what"},
                "ratio": each.ratio,
            }
            for each in check.inputs
        ],
        "ranks": [[each._asdict() for each in rank] for rank in check.ranks],
        "step_range": None if found.sampled is None else list(found.sampled.range()),
        "tensor_bytes": [list(pair) for pair in found.tensor_bytes],
        "measure_again": [asdict(each) for each in advice(found)],
        "notes": list(found.notes),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Inputs that were wrong, and the command that measures them, or None."""

    why: tuple[str, ...]
    command: str | None


def heading(found: CheckedRun) -> str:
    plan, check = found.plan, found.check
    steps = "1 traced step" if check.num_steps == 1 else f"medians of {count(check.num_steps, 'traced step')}"
    return (
        f"{found.name}: {plan.schedule}, {count(len(plan.stages), 'stage')} on {count(plan.num_devices, 'rank')}, "
        f"{steps}"
    )


def table(found: CheckedRun) -> None:
    check, out = found.check, console()
    out.print(heading(found), markup=False, soft_wrap=True)
    out.print()
    out.print(_causes(check.predicted, check.causes))
    out.print(_inputs(check.inputs, check.predicted))
    out.print(_ranks(check.ranks))
    if found.tensor_bytes:
        out.print(_memory(found.tensor_bytes))
    for line in (*_told(found), *(f"note: {note}" for note in found.notes)):
        is_command = line.startswith("    ")  # to be copied
        out.print(line if is_command else wrapped(line), markup=False, soft_wrap=True)


# --- what to measure again ---


def advice(found: CheckedRun) -> list[Advice]:
    """Inputs to measure again, by command, those that change the step most first."""
    by_command: dict[str | None, list[str]] = {}
    for each in found.check.wrong:
        by_command.setdefault(_command(each, found), []).append(_why(each, found.check))
    return [Advice(why=tuple(why), command=command) for command, why in by_command.items()]


def _why(each: InputCheck, check: PredictionCheck) -> str:
    what, own = (
        each.what,
        f"; with the other inputs of its cause {signed(check.cause(each.what.cause).seconds)} a step",
    )
    if check.matters_alone(each):
        own = f"; alone {signed(each.alone or 0.0)} a step"
    plural = what.kind == "message"
    if each.ratio is None:
        words = f"{what} {'take' if plural else 'takes'} {duration(each.measured)}, and the plan knows nothing of that"
    else:
        times = f"{each.ratio:.2f}" if each.ratio < _FAR else f"over {_FAR:,}"  # of links that a plan took to be free
        words = (
            f"{what} {'take' if plural else 'takes'} {times} times as long as planned "
            f"({duration(each.measured)}, {duration(each.predicted)} planned)"
        )
    return words + own


def _command(each: InputCheck, found: CheckedRun) -> str | None:
    what, plan = each.what, found.plan
    if what.kind == "norm" and plan.costs.norm is None:
        return f"stagewright plan ... --clip {_clip(found.config):g}"  # planned without clipping
    if (what.kind == "norm" and plan.costs.norm) or (
        what.kind in _OF_LINKS and len(what.at) > 1 and what.kind != "message"
    ):
        return None  # clipping beside the latencies of the norm, and sums of tied weights: no one input
    # Most of what a plan has around the actions of a stage may be what its messages keep a rank busy.
    is_of_messages = what.kind == "overhead" and (
        each.predicted > 2 * by_stage(plan.costs.overhead, len(plan.stages))[what.at[0]]
    )
    if what.kind == "norm" or what.kind in _OF_LINKS or is_of_messages:
        if len(found.ranks_by_host) > 1:
            return "torchrun ... -m stagewright profile --links --out cluster.json"
        return f"stagewright profile --links --ranks {plan.num_devices} --out cluster.json"
    return profile_command(found.config, plan, ranks=max(found.ranks_by_host, default=plan.num_devices))


def profile_command(config: Mapping[str, Any], plan: Plan, *, ranks: int) -> str:
    """The command that profiles the model of a run again in the plan's microbatches, on `ranks` ranks of a host."""
    words, microbatch, tensor = ["stagewright", "profile"], plan.microbatch_size, plan.tensor
    names = _OWN if config.get("model") else _GPT
    for name in names:
        if config.get(name) is not None:
            words += [f"--{name}", str(config[name])]
    words += [] if microbatch is None else ["--microbatch", str(microbatch)]
    words += ["--tensor", str(tensor)] if tensor > 1 else []
    words += ["--ranks", str(ranks)] if ranks > 1 else []
    words += [] if _clip(config) == DEFAULT_CLIP else ["--clip", f"{_clip(config):g}"]
    return shlex.join([*words, "--out", "profile.json"])


def _clip(config: Mapping[str, Any]) -> float:
    clip = config.get("clip")
    return DEFAULT_CLIP if clip is None else float(clip)


def _told(found: CheckedRun) -> Iterable[str]:
    check = found.check
    told = advice(found)
    if not told:
        yield "no input is off by 5% and worth 1% of the step: nothing to measure again"
    else:
        yield "measure again, on the machines that train and while nothing else runs there:"
    for each in told:
        yield from (f"  {why}" for why in each.why)
        if found.plan.tensor > 1 and each.command is not None and "--tensor" in each.command:
            yield "    (F and B have the sums over tensor ranks in them, which --links measures, too)"
        yield f"    {each.command}" if each.command else "    (no command measures it alone)"
        if each.command is not None and "--links" not in each.command and len(found.ranks_by_host) > 1:
            yield "    (on each host; --links --profiles takes the files of hosts that are not equally fast)"
    spread = check.cause(Cause.SPREAD).seconds
    if spread > 0.01 * check.predicted:
        yield (
            f"spread: durations vary, and ranks wait for the longest: {signed(spread)} a step over what their medians "
            f"give; no input says that"
        )
    if found.sampled is not None:
        low, high = map(duration, found.sampled.range())
        yield (
            f"steps drawn from this run's own durations: median {duration(found.sampled.median)}, {SHARE:.0%} of them "
            f"{low} .. {high}"
        )


# --- tables ---


def _causes(simulated: float, causes: Sequence[Change]) -> Table:
    rows = new_table("seconds a step, by cause", ("cause",), ("change", "of simulated", "step"))
    rows.add_row("simulated", "", "", duration(simulated))
    for each in causes:
        share = f"{each.seconds / simulated:+.1%}" if simulated > 0 else ""
        rows.add_row(f"  {each.name}", signed(each.seconds), share, duration(each.after))
        if each.name == Cause.UNEXPLAINED:
            rows.add_row("actions as measured", "", "", duration(each.after))
    if causes[-1].name == Cause.OUTSIDE:
        rows.add_row("measured, as the training loop has it", "", "", duration(causes[-1].after))
    return rows


def _inputs(inputs: Sequence[InputCheck], simulated: float) -> Table:
    some = sorted(inputs, key=lambda each: -abs(each.seconds))[:_MOST_ROWS]
    left = f", {len(inputs) - len(some)} more without a row" if len(some) < len(inputs) else ""
    rows = new_table(
        f"\ninputs{left}; alone: change of the step by this input alone",
        ("input",),
        ("planned", "measured", "a step", "more", "alone"),
    )
    for each in inputs:
        if each not in some or each.predicted == each.measured == 0:
            continue
        rows.add_row(
            str(each.what),
            duration(each.predicted),
            duration(each.measured),
            f"x{each.times:g}",
            signed(each.seconds),
            "" if each.alone is None else f"{each.alone / simulated:+.1%}",
        )
    return rows


def _ranks(ranks: Sequence[Sequence[Change]]) -> Table:
    names = [each.name for each in next((rank for rank in ranks if rank), ())]
    title = "\nranks, simulated and measured in the middle one of these steps"
    rows = new_table(title, ("rank", ""), [name.replace(" ", "\n", 1) for name in names])
    ends = _MOST_ROWS // 2
    for number, rank in enumerate(ranks):
        if len(ranks) > _MOST_ROWS and ends <= number < len(ranks) - ends:
            if number == ends:
                rows.add_row("...", f"{len(ranks) - 2 * ends} more", *("" for _ in names))
            continue
        if rank:
            rows.add_row(str(number), "simulated", *(duration(each.before) for each in rank))
            rows.add_row("", "measured", *(duration(each.after) for each in rank))
        else:
            rows.add_row(str(number), "not recorded", *("" for _ in names))
    return rows


def _memory(pairs: Sequence[tuple[float, float]]) -> Table:
    names = ("predicted", "measured", "predicted / measured")
    rows = new_table("\ntensors at the peak, by process", ("process",), names)
    for number, (expected, there) in enumerate(pairs[:_MOST_ROWS]):
        ratio = f"{expected / there - 1:+.1%}" if there > 0 else ""
        rows.add_row(str(number), size(expected), size(there), ratio)
    return rows
