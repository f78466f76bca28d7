"""The report: a table for people, or one JSON object."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from ... import __version__
from ..host import num_cores, processor
from .figure import Figure, Judged, Target
from .records import Breakdown, Measurement, PingPong, Record, Spread
from .workloads import WORKLOADS, Workload

MIN_REPETITIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All figures of one run, and what they come from."""

    repetitions: int
    figures: Sequence[Figure]
    records: Sequence[Record]

    def as_json(self) -> dict[str, object]:
        """One object: environment, figures with targets and verdicts, raw records."""
        return {
            "environment": environment(),
            "repetitions": self.repetitions,
            "figures": [
                {
                    **asdict(figure),
                    "origin": figure.origin.value,
                    "verdict": figure.verdict,
                }
                for figure in self.figures
            ],
            "where_time_goes": where_time_goes(self.records),
            "records": [{"type": type(record).__name__, **asdict(record)} for record in self.records],
        }

    def print_on(self, console: Console) -> None:
        """The table, where the time goes, and what the columns mean."""
        console.print(self._table())
        for line in where_time_goes(self.records):
            console.print(line, markup=False)
        for record in self.records:
            if isinstance(record, Breakdown) and record.profile:
                title = f"\nin-process step under cProfile, {record.schedule}:"
                console.print(title, record.profile.strip(), sep="\n", markup=False)
        described = ", ".join(f"{name} {value}" for name, value in environment().items())
        console.print(f"\n{described}", markup=False)
        console.print(
            "Medians with [smallest .. largest] sample; ratios to torch are of neighbouring repetitions. "
            "measured: real work in real processes, one thread each. emulated: real processes and messages, "
            "stages that sleep. simulated: the event simulator. planned: what the plan said before it was run.",
            markup=False,
        )
        if self.repetitions < MIN_REPETITIONS:
            console.print(f"Only {self.repetitions} repetitions: for debugging. Expected {MIN_REPETITIONS} or more.")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("case", "what was run", "figure"):
            table.add_column(name)
        for name in ("median", "range", "target"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("", "origin", "from"):
            table.add_column(name)
        before = None
        for figure in self.figures:
            color = {"ok": "green", "missed": "red"}.get(figure.verdict, "default")
            value, unit = figure.value, figure.unit
            table.add_row(
                figure.case if figure.case != before else "",
                figure.workload,
                figure.what,
                shown(value.median, unit),
                f"[{shown(value.low, unit)} .. {shown(value.high, unit)}]".replace("[", "\\["),
                _shown_target(figure.target, unit),
                f"[{color}]{figure.verdict}[/]",
                figure.origin.value,
                figure.note,
            )
            before = figure.case
        return table


def where_time_goes(records: Sequence[Record]) -> list[str]:
    """A breakdown of the overhead workloads: what a microbatch of a step at no compute is made of."""
    lines: list[str] = []
    steps = {r.workload: r for r in records if isinstance(r, Measurement)}
    messages = next((r for r in records if isinstance(r, PingPong)), None)
    for record in records:
        if not isinstance(record, Breakdown) or messages is None:
            continue
        workload = WORKLOADS[f"overhead-{record.schedule}"]
        lines.append(f"\nwhere the time goes, {record.schedule} {workload.shape}, us a microbatch (measured):")
        lines += _breakdown_lines(workload, steps.get(workload.name), record, messages)
    return lines


def _breakdown_lines(workload: Workload, step: Measurement | None, record: Breakdown, messages: PingPong) -> list[str]:
    in_process, autograd = Spread.of(record.in_process), Spread.of(record.autograd)
    tight, paced = Spread.of(messages.tight).median, Spread.of(messages.paced).median
    num_messages = 2 * (workload.num_stages - 1)
    rows = []
    if step is not None:
        for name, times in (("ours", step.ours), ("torch", step.torch)):
            rows.append((f"step, {name}", Spread.of(times).median / workload.num_microbatches, "over gloo"))
    rows += [
        ("autograd and modules", autograd.median, "a bare loop in one process, the stages of both ranks"),
        (
            "engine (Python)",
            in_process.median - autograd.median,
            "step with the in-process transport less that, both ranks",
        ),
        ("a message, tight", tight, f"one way; {num_messages} a microbatch, partly at the same time"),
        ("a message, paced", paced, f"one way to a receiver that slept {2:.0f} ms: gloo's wake-up"),
    ]
    return [f"  {name:<22}{seconds * 1e6:>9.1f}   {what}" for name, seconds, what in rows]


def shown(value: float, unit: str) -> str:
    """A value in its unit.

    >>> shown(0.0123, "error"), shown(1.02, "ratio"), shown(250000.0, "actions/s")
    ('1.23%', '1.020', '250,000')
    """
    if unit == "error":
        return f"{value:.2%}"
    if unit in ("actions/s", "ms"):
        return f"{value:,.0f}" if unit == "actions/s" else f"{value:.1f} ms"
    return f"{value:.3f}" if unit == "ratio" else f"{value:.2f} {unit}"


def _shown_target(target: Target | None, unit: str) -> str:
    if target is None:
        return ""
    which = "all " if target.judged is Judged.WORST else ""
    return f"{which}{'>=' if target.at_least else '<='} {shown(target.limit, unit)}"


def environment() -> dict[str, str]:
    """Versions and machine: all that a figure depends on besides the code."""
    return {
        "stagewright": __version__,
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(num_cores()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
