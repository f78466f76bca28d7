"""Findings of `vtrain`: how far predictions are off, which rows they miss, what rows beside those say, and causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..jobs.figure import Figure, How
from .vtrain import APART_MEAN, APART_WORST, FAR, LEAST_MEAN, LEAST_WORST, MEAN, OFF, OFF_ALL, ROWS, WORST

_NEAR = 0.06  # off: rows that the model explains
_KEYS = ("gpus", "hidden", "layers", "batch", "tensor", "data", "pipeline", "microbatch")
_MANY = 4  # rows beside one that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Figures of one row."""

    number: int
    gpus: int
    hidden: int
    layers: int
    batch: int
    tensor: int
    data: int
    pipeline: int
    microbatch: int
    seconds: float  # measured
    ratio: float  # predicted / measured, by the other half
    of_all: float  # likewise, by a fit to all rows

    @property
    def error(self) -> float:
        """How far it is off."""
        return abs(self.ratio - 1)

    @property
    def predicted(self) -> float:
        """Seconds by the other half."""
        return self.ratio * self.seconds

    @property
    def place(self) -> tuple[int, ...]:
        """All but the microbatch."""
        return self.gpus, self.hidden, self.layers, self.batch, self.tensor, self.data, self.pipeline

    @property
    def block(self) -> tuple[int, ...]:
        """Rows that `agreement` compares."""
        return self.gpus, self.hidden, self.layers, self.batch, self.tensor

    @property
    def slots(self) -> int:
        """Microbatches that pass the last stage, the fill included."""
        return self.batch // (self.data * self.microbatch) + self.pipeline - 1

    def __str__(self) -> str:
        return (
            f"row {self.number} (h = {self.hidden}, T = {self.tensor}, {self.data} replicas, P = {self.pipeline}, "
            f"microbatches of {self.microbatch})"
        )


def findings(figures: Sequence[Figure]) -> list[str]:
    """How far the predictions are off, which rows they miss, and why."""
    found = _rows_of(figures)
    said = _of_halves(figures)
    least = _agreement(figures)
    if found:
        far = sorted((row for row in found if row.error > FAR), key=lambda row: -row.error)
        rest = [row.error for row in found if row not in far]
        said.append(
            "Each row by the device that every second of the others gave: "
            f"{_mean_and_worst([row.error for row in found])}, "
            f"{len(far)} of {len(found)} rows off by more than {FAR:.0%}."
        )
        if far and rest:
            said.append(f"The other {len(rest)}: {_mean_and_worst(rest)}.")
        said += [_why(row, found, least) for row in far]
    return said + [_block(block, figures_) for block, figures_ in least.items() if figures_[LEAST_WORST] > _NEAR]


def _rows_of(figures: Sequence[Figure]) -> list[_Row]:
    by_row: dict[int, dict[tuple[str, How], Figure]] = {}
    for figure in figures:
        if "row" in figure.case:
            by_row.setdefault(figure.case.count("row"), {})[figure.name, figure.how] = figure
    return [
        _Row(
            number=number,
            **{key: own["step", How.PUBLISHED].case.count(key) for key in _KEYS},
            seconds=own["step", How.PUBLISHED].value,
            ratio=own[OFF, How.SIMULATED].value,
            of_all=own[OFF_ALL, How.SIMULATED].value,
        )
        for number, own in sorted(by_row.items())
    ]


def _of_halves(figures: Sequence[Figure]) -> list[str]:
    said = []
    for held_out, what in (
        (True, "halves, each predicted by a device that the other rows gave"),
        (False, "fit to all rows, which predicts the same ones (nothing is held out)"),
    ):
        of = [
            figure for figure in figures if "split" in figure.case and (figure.case.get("split") != "none") is held_out
        ]
        means = [figure.value for figure in of if figure.name == MEAN]
        worst = [figure.value for figure in of if figure.name == WORST]
        if means:
            spread = f" ({min(means):.1%} to {max(means):.1%} by half)" if held_out else ""
            average = sum(means) / len(means)
            said.append(f"{len(means)} {what}: {average:.1%} off on average{spread}, {max(worst):.1%} at worst.")
    return said


def _agreement(figures: Sequence[Figure]) -> dict[tuple[int, ...], dict[str, float]]:
    """Figures of each block of rows that are compared, by name."""
    found: dict[tuple[int, ...], dict[str, float]] = {}
    for figure in figures:
        if figure.name in (ROWS, LEAST_MEAN, LEAST_WORST, APART_MEAN, APART_WORST):
            block = tuple(figure.case.count(key) for key in _KEYS[:5])
            found.setdefault(block, {})[figure.name] = figure.value
    return found


def _block(block: tuple[int, ...], of: Mapping[str, float]) -> str:
    gpus, hidden, _, _, tensor = block
    return (
        f"The {of[ROWS]:.0f} rows of h = {hidden} with T = {tensor} on {gpus} GPUs contradict each other: whatever "
        "seconds a layer takes by microbatch, messages, sums of gradients, update, embedding and head, they are off by "
        f"{of[LEAST_MEAN]:.1%} on average at least, and one of them by {of[LEAST_WORST]:.1%}, with nothing held out. "
        "Where each layout (replicas and P) may have a step, a microbatch and a sequence of its own beside the layers, "
        f"as links, cards or nodes would make it, {of[APART_MEAN]:.1%} and {of[APART_WORST]:.1%} are left."
    )


def _why(row: _Row, found: Sequence[_Row], least: Mapping[tuple[int, ...], Mapping[str, float]]) -> str:
    """Which seconds are missing, which rows beside it say so, and the likely cause."""
    way = "short" if row.ratio < 1 else "long"
    text = f"{row}: {row.error:.1%} too {way}, {abs(row.predicted - row.seconds):.1f} s of {row.seconds:.1f} s."
    beside = _beside(row, found)
    against = [other for other, _ in beside if abs(row.ratio / other.ratio - 1) > FAR]
    if beside:
        text += f" It took {'; '.join(_ratio(row, other, what) for other, what in beside)}."
    if abs(row.of_all - 1) < _NEAR:
        cause = (
            f"a constant that it shows and the half does not; fitted to all rows it is {abs(row.of_all - 1):.1%} off"
        )
    elif row.ratio > 1:
        cause = "a cost that rows like it do not have, or a part of it that takes less than elsewhere"
    elif any(other.place == row.place and other.error < _NEAR for other in against):
        cause = (
            "this run (a slow device, a busy network): other microbatches in the same layout, with the same sums and "
            "links, were well predicted"
        )
    elif missing := _missing(row, found):
        cause = missing
    elif least.get(row.block, {}).get(LEAST_WORST, 0.0) > _NEAR and against:
        cause = "this run, or one of those beside it: no cost of a layer, a message or a sum makes all of them right"
    elif against:
        cause = "this run (a slow device, a busy network), or a cost that only rows like it have"
    else:
        cause = "a cost of these sizes that the model does not have: no row beside it contradicts"
    return f"{text} Likely: {cause}."


def _ratio(row: _Row, other: _Row, what: str) -> str:
    measured, predicted = row.seconds / other.seconds, row.predicted / other.predicted
    return f"{measured:.2f} times as long as row {other.number} ({what}), predicted {predicted:.2f}"


def _beside(row: _Row, found: Sequence[_Row]) -> list[tuple[_Row, str]]:
    """Rows that differ in one setting, and which; those of another microbatch first, then the best predicted."""
    beside = [(other, what) for other in found if (what := _difference(row, other))]
    beside.sort(key=lambda each: (each[0].place != row.place, each[0].error))
    return beside[:_MANY]


def _difference(row: _Row, other: _Row) -> str:
    """The setting in which the other differs: one, or two of T, D and P whose product is the same; else ""."""
    if (row.hidden, row.layers) != (other.hidden, other.layers):
        return ""
    words: dict[str, Callable[[int], str]] = {
        "tensor": lambda size: f"T = {size}",
        "data": lambda size: f"{size} replica{'s' * (size > 1)}",
        "pipeline": lambda size: f"P = {size}",
        "microbatch": lambda size: f"microbatches of {size}",
        "batch": lambda size: f"a batch of {size}",
    }
    own, others = ({key: getattr(each, key) for key in words} for each in (row, other))
    changed = [key for key in words if own[key] != others[key]]
    layout = set(changed) <= {"tensor", "data", "pipeline"} and len(changed) == 2 and row.gpus == other.gpus
    devices = changed == ["data"]  # as many more devices
    if not (layout or devices or changed in (["microbatch"], ["batch"])):
        return ""
    return ", ".join(words[key](others[key]) for key in changed)


def _missing(row: _Row, found: Sequence[_Row]) -> str:
    """Rows of the same devices and other microbatches are all too short: what their missing seconds go with."""
    same = sorted((each for each in found if each.place == row.place), key=lambda each: each.microbatch)
    if len(same) < 2 or any(each.ratio > 1 - _NEAR for each in same):
        return ""
    costs: tuple[tuple[str, Callable[[_Row], int]], ...] = (
        ("a step, whatever the microbatches, as sums would", lambda _: 1),
        ("each microbatch of a stage, whatever its size, as one late stage would", lambda each: each.slots),
        ("each sequence of a stage, as slow layers or messages would", lambda each: each.slots * each.microbatch),
    )

    def apart(times: Callable[[_Row], int]) -> float:
        seconds = [(each.seconds - each.predicted) / times(each) for each in same]
        return max(seconds) / min(seconds)

    what, times = min(costs, key=lambda cost: apart(cost[1]))
    each = " and ".join(f"{(row_.seconds - row_.predicted) / times(row_):.2g}" for row_ in same)
    rows = " and ".join(str(row_.number) for row_ in same)
    return f"one cause for all runs of this layout: rows {rows} lack {each} s for {what}"


def _mean_and_worst(errors: Sequence[float]) -> str:
    return f"{sum(errors) / len(errors):.1%} off on average, {max(errors):.1%} at worst"
