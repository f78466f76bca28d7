"""The bench's report: its cases in order, with a line per figure and its target, or as one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ... import __version__
from ...cli.host import num_cores, processor
from ...cli.tables import table
from ..jobs.figure import Figure, Judged, Spread, Target
from ..jobs.tables import shown

CASES = {
    "overhead-1f1b": "step time at no compute, 1F1B: at most 1.1 of torch's",
    "overhead-interleaved": "step time at no compute, interleaved: at most half of torch's",
    "sleep-1f1b": "stages that sleep, 1F1B: within 1.02 of the ideal, not slower than torch",
    "sleep-interleaved": "stages that sleep, interleaved: within 1.03 of the ideal, not slower than torch",
    "prediction": "the simulator against measured steps: 2% where stages sleep, 3% on the GPT",
    "gpt": "a GPT with AdamW on two ranks: at least as fast as torch, schedule by schedule",
    "gpt-4": "the same on four ranks: counts where there are four cores",
    "async-sleep": "throughput of 2bw, stages that sleep: 1.68 (P=4) and 1.8 (P=8) times 1F1B, ours and torch's",
    "async-gpt": "throughput of 2bw, a GPT with AdamW, M=2: 1.42 times torch's 1F1B, 1.22 times its interleaved",
    "receive-bytes": "receives posted and not consumed: M=64 at most as M=8, or 16 MiB",
    "overlap": "gradients summed over a slow wire: during the backwards that follow, and after them",
    "exchanges": "experts over a slow link: exchanges during compute of another microbatch, and alone",
    "checkpoints": "a GPT with AdamW on two ranks: checkpoints during training and blocking saves; 3.5% by auto",
    "split-backward": "I and W over the whole backward: at most 1.05 on a GPT's stage and 1.25 on small linears",
    "start": "CPU seconds of building and of the first step, in one process: a GPT, and transformers' GPT-2",
    "simulator": "the simulator's own speed and memory",
    "partitioner": "its speed: published profiles in 1/20 of PipeDream's time, 1,000 layers on 1,024 devices in 10 s",
    "planner": "its speed: a transformer of 100 layers on 1,024 GPUs in 60 s",
    "planning-scale": "seconds of CPU and memory of plans for 1,000 to 100,000 devices, each once",
    "planned-run": "plans carried out: step time within 10% (a GPT) and 5% (layers that sleep), memory within 10%",
    "auto": 'schedule="auto" against the best of torch\'s pipelines and DDP (two and four ranks, a core each)',
    "regret": "the chosen plan against the next four, each run (layers that sleep): within 1% of the fastest",
    "uneven-cut": "uneven models on two ranks: cut by profile, faster than equal layers or equal parameters",
}
MIN_REPETITIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the report: the repetitions of one figure."""

    case: str
    workload: str  # what the case ran
    what: str  # name of the value
    unit: str
    value: Spread
    target: Target | None
    origin: str  # "simulated / measured" for a prediction
    note: str  # the times of a ratio

    @classmethod
    def of(cls, figures: Sequence[Figure], note: str = "") -> Line:
        first, samples = figures[0], [figure.value for figure in figures]
        predicted = first.case.get("predicted")
        return cls(
            case=first.case.text("case"),
            workload=first.case.text("run"),
            what=first.name,
            unit=first.unit,
            value=Spread.of_errors(samples) if first.unit == "error" else Spread.of(samples),
            target=first.target,
            origin=f"{predicted} / {first.how.value}" if predicted else first.how.value,
            note=note + first.note,
        )

    @property
    def verdict(self) -> str:
        """ok, missed, or empty without a target."""
        return "" if self.target is None else "ok" if self.target.met(self.value) else "missed"


def lines_of(figures: Sequence[Figure], names: Sequence[str]) -> list[Line]:
    """A line per figure, in the order of the cases; for variants of a problem the slowest, which names the others."""
    groups: dict[tuple[object, ...], dict[str, list[Figure]]] = {}
    for figure in figures:
        if figure.target is not None:
            figure.case.text("case")  # raises ValueError for a figure that would be lost
        if figure.case.get("case") in names:
            variant = str(figure.case.get("variant", ""))
            key = (figure.case.text("case"), figure.case.text("run"), "" if variant else figure.name)
            groups.setdefault(key, {}).setdefault(variant, []).append(figure)
    lines = []
    for variants in groups.values():
        medians = {variant: median(figure.value for figure in same) for variant, same in variants.items()}
        slowest = max(medians, key=medians.__getitem__)
        unit = variants[slowest][0].unit
        others = [f"{variant} {value:.4g} {unit}, " for variant, value in medians.items() if variant != slowest]
        lines.append(Line.of(variants[slowest], "".join(others)))
    return sorted(lines, key=lambda line: list(CASES).index(line.case))


def report(figures: Sequence[Figure], names: Sequence[str], *, repetitions: int, as_json: bool = False) -> None:
    """Print one JSON object, or a table with a breakdown of the time and a legend."""
    lines, where = lines_of(figures, names), where_time_goes(figures)
    if as_json:
        answer = {
            "environment": environment(),
            "repetitions": repetitions,
            "figures": [{**asdict(line), "verdict": line.verdict} for line in lines],
            "where_time_goes": where,
            "records": [json.loads(figure.to_json()) for figure in figures],
        }
        print(json.dumps(answer))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # in a file, so that no row is folded at 80 columns
    rows = table("", ("case", "what was run", "figure"), ("median", "range", "target"))
    for name in ("", "origin", "from"):
        rows.add_column(name)
    before = None
    for line in lines:
        color = {"ok": "green", "missed": "red"}.get(line.verdict, "default")
        low, high = (shown(value, line.unit) for value in (line.value.low, line.value.high))
        rows.add_row(
            line.case if line.case != before else "",
            line.workload,
            line.what,
            shown(line.value.median, line.unit),
            f"\\[{low} .. {high}]",
            _shown_target(line),
            f"[{color}]{line.verdict}[/]",
            line.origin,
            line.note,
        )
        before = line.case
    console.print(rows)
    described = ", ".join(f"{name} {value}" for name, value in environment().items())
    for text in (*where, *_profiles(figures), f"\n{described}", _LEGEND):
        console.print(text, markup=False)
    if repetitions < MIN_REPETITIONS:
        console.print(f"Only {repetitions} repetitions: for debugging. Expected {MIN_REPETITIONS} or more.")


_LEGEND = (
    "Medians with [smallest .. largest] sample; ratios to torch are of neighbouring repetitions. measured: real work "
    "in real processes, one thread each. emulated: real processes and messages, stages that sleep. simulated: the "
    "event simulator. planned: what the plan said before it was run."
)


def _profiles(figures: Sequence[Figure]) -> Iterator[str]:
    for figure in figures:
        if figure.name == "in process" and figure.repetition == 0 and figure.note:
            yield f"\nin-process step under cProfile, {figure.case.text('run')}:\n{figure.note.strip()}"


def where_time_goes(figures: Sequence[Figure]) -> list[str]:
    """Lines on the parts of a microbatch's time in a step without compute."""
    found: dict[str, dict[str, list[float]]] = {}
    for figure in figures:
        if figure.case.get("model") == "tiny":
            found.setdefault(figure.case.text("run"), {}).setdefault(figure.name, []).append(figure.value)
    lines = []
    for run, samples in found.items():
        medians = {name: median(values) for name, values in samples.items()}
        lines.append(f"\nwhere the time goes, {run}, us a microbatch (measured):")
        lines += [f"  {name:<22}{seconds * 1e6:>9.1f}   {what}" for name, seconds, what in _breakdown(run, medians)]
    return lines


def _breakdown(run: str, seconds: Mapping[str, float]) -> Iterator[tuple[str, float, str]]:
    sizes = {word[0]: int(word[2:]) for word in run.split()[1:]}
    messages = 2 * (sizes["P"] * sizes.get("V", 1) - 1)
    for side in ("ours", "torch"):
        yield f"step, {side}", seconds[f"step, {side}"] / sizes["M"], "over gloo"
    yield "autograd and modules", seconds["autograd"], "a bare loop in one process, the stages of both ranks"
    engine = seconds["in process"] - seconds["autograd"]
    yield "engine (Python)", engine, "step with the in-process transport less that, both ranks"
    tight, paced = seconds["message, tight"], seconds["message, paced"]
    yield "a message, tight", tight, f"one way; {messages} a microbatch, partly at the same time"
    yield "a message, paced", paced, "one way to a receiver that slept 2 ms: gloo's wake-up"


def _shown_target(line: Line) -> str:
    target = line.target
    if target is None:
        return ""
    which = "all " if target.judged is Judged.WORST else ""
    return f"{which}{'>=' if target.at_least else '<='} {shown(target.limit, line.unit)}"


def environment() -> dict[str, str]:
    return {
        "stagewright": __version__,
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(num_cores()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
