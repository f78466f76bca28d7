"""Gains of a batch when cut, placement and schedule are chosen together, on layers of unequal kinds.

Profiles are drawn from a seed, the same on every machine. A profile has 12 to 20 blocks, whose F, I and W vary by a few
tenths. What is drawn further:

    large head             a last layer of 2 to 5 blocks, with half a block's activation
    dense then sparse      a second half of sparse blocks: 1.5 to 3 times the seconds, twice the activation
    encoder in front       4 to 8 layers of 0.2 to 0.6 blocks, with 1.5 to 3 times the activation

"all" has all three, "encoder and head" two of them. Memory is once or one and a half times what P microbatches hold of
a P-th of the layers each; latency is a twentieth of a rank's forward, or none.

    gain    seconds of partition first and schedule after, over those of the joint choice, less 1. The former has the
            cut whose largest stage is smallest, on the best of three placements, and the same evaluations a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from statistics import median, quantiles

from ...schedules.search.joint import Layer, synthesize_jointly
from ...schedules.search.synthesize import synthesize
from ...schedules.timing.costs import Costs
from ..jobs.case import Case
from ..jobs.figure import Figure, How

_CUTS = 24  # that are tried besides the first three
_ORDERS = 240  # for the schedule of a first or a last cut
_PATIENCE = 300.0  # [s] a profile: only against hangs
_SECONDS = (1, 5, 20, 60)  # of a search, after which it is looked at
_KINDS = ("large head", "dense then sparse", "encoder in front", "encoder and head", "all")


def simulated(case: Case, repetitions: int) -> Iterator[Figure]:
    """Both values and the gain of one profile. Cases have `ranks`, `microbatches`, `kind` and `number`."""
    del repetitions
    ranks = case.count("ranks")
    kind, number = case.text("kind"), case.count("number")
    random = Random(f"{kind} {number}")
    layers = profile(kind, random)
    held = sum(each.activation for each in layers)
    latency = random.choice((0.0, 0.05)) * sum(each.forward for each in layers) / ranks
    found = synthesize_jointly(
        layers,
        num_ranks=ranks,
        num_microbatches=case.count("microbatches"),
        latency=latency,
        memory_limit=random.choice((1.0, 1.5)) * held,
        placements=("plain", "cyclic", "v"),
        cuts=_CUTS,
        evaluations=_ORDERS,
        seconds=_PATIENCE,
    )
    for name, each in (("partition first", found.separate), ("joint", found.best)):
        note = f"{each.placement} {'-'.join(map(str, each.cut))}"
        yield Figure(case=case, name=name, value=each.value, unit="s", how=How.SIMULATED, note=note)
    note = f"{found.separate.placement} to {found.best.placement}"
    yield Figure(case=case, name="gain", value=found.gain, unit="fraction", how=How.SIMULATED, note=note)


def over_time(case: Case, repetitions: int) -> Iterator[Figure]:
    """The gap after each of `_SECONDS`, of one search. Cases have `placement`, `ranks`, `microbatches` and `limit`."""
    del repetitions
    placement, ranks = case.text("placement"), case.count("ranks")
    random = Random(1)
    forward = [random.uniform(0.8, 1.2) for _ in range(ranks if placement == "plain" else 2 * ranks)]
    weight = [0.6 * each for each in forward]
    found = synthesize(
        num_ranks=ranks,
        num_microbatches=case.count("microbatches"),
        costs=Costs(forward=forward, input_grad=[1.1 * f for f in forward], weight_grad=weight, latency=0.05),
        memory_limit=case.count("limit"),
        placement=placement,
        seconds=_SECONDS[-1],
    )
    for seconds in _SECONDS:
        so_far = [point for point in found.history if point.seconds <= seconds] or [found.history[0]]
        also = case.also(seconds=seconds)
        note = f"{so_far[-1].value:.6g} by {so_far[-1].source}"
        yield Figure(case=also, name="gap", value=so_far[-1].gap, unit="fraction", how=How.SIMULATED, note=note)


def profile(kind: str, random: Random) -> list[Layer]:
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(_KINDS)}")

    def layer(size: float, activation: float) -> Layer:
        forward, input_grad, weight_grad = (size * random.uniform(low, low + 0.4) for low in (0.8, 0.9, 0.6))
        own = activation * random.uniform(0.9, 1.1)
        return Layer(forward=forward, input_grad=input_grad, weight_grad=weight_grad, activation=own)

    blocks = random.randint(12, 20)
    layers = []
    if kind in ("encoder in front", "encoder and head", "all"):
        size, activation = random.uniform(0.2, 0.6), random.uniform(1.5, 3.0)
        layers += [layer(size, activation) for _ in range(random.randint(4, 8))]
    sparse = random.uniform(1.5, 3.0) if kind in ("dense then sparse", "all") else None
    for block in range(blocks):
        layers.append(layer(sparse, 2.0) if sparse is not None and 2 * block >= blocks else layer(1.0, 1.0))
    if kind in ("large head", "encoder and head", "all"):
        layers.append(layer(random.uniform(2.0, 5.0), 0.5))
    return layers


def findings(figures: Sequence[Figure]) -> list[str]:
    """Median and quartiles of the gain, of all profiles and by kind."""
    gains = [each for each in figures if each.name == "gain"]
    if len(gains) < 2:
        return []
    values = [each.value for each in gains]
    moved = sum(len(set(each.note.split(" to "))) > 1 for each in gains)
    said = [
        f"Of {len(gains)} profiles the joint choice is faster in {sum(value > 1e-9 for value in values)}, by "
        f"{_spread(values)}; it takes another placement than partition first in {moved}."
    ]
    for kind in dict.fromkeys(each.case.text("kind") for each in gains):
        said.append(f"{kind}: {_spread([each.value for each in gains if each.case.text('kind') == kind])}.")
    return said


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1%}"
    first, _, third = quantiles(values, n=4, method="inclusive")
    return (
        f"{median(values):.1%} (median; quartiles {first:.1%} and {third:.1%}, {min(values):.1%} to {max(values):.1%})"
    )
