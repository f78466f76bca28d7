"""How far measured trainings contradict each other, whatever a layer, a message and a sum take.

Trainings of one model on as many devices, with one batch and T, differ in replicas D, stages P and microbatches of b.
A step of 1F1B with M microbatches is then a sum of

    (M + P-1) / P * layers(b)       all layers on one microbatch; more for more sequences, a sequence no more
    (M + P-1), (M + P-1) b          messages between stages, and what a microbatch costs whatever its size  (P > 1)
    M b, b                          embedding and head, which only the first and the last stage have; their fill
    1/P                             the update
    (1 - 1/D) / P, 1 - 1/D          sums of gradients, of layers and of embedding and head
    (1 - 1/nodes) / P               the same between nodes
    1                               whatever a step costs

each times seconds that are the same in all of them. Here they may be any: what is least off then is less off than by
any model of that form. It is a linear program; no constant is fitted, and no device known. With `layouts_apart`
messages, sums and update may differ from layout (D, P) to layout, as links, cards and places in a cluster do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...partition.strict import fail
from .device_fit import Floats
from .trainings import NODE, MeasuredTraining

_ALIKE = ("num_devices", "batch_size", "layers", "hidden", "heads", "vocabulary", "length", "tensor", "chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastErrors:
    """Errors |predicted / measured - 1| below which no seconds of layers, messages and sums can go.

    Arguments:
        average: over all trainings.
        worst: of one of them.
    """

    average: float
    worst: float


def least_errors(trainings: Sequence[MeasuredTraining], *, layouts_apart: bool = False) -> LeastErrors:
    """The least average and the least worst error, each by the seconds that are best for it.

    Arguments:
        trainings: which are compared.
        layouts_apart: whether each layout (D, P) has seconds of its own for a step, a microbatch in a stage, and a
            sequence of one; only layers, embedding and head then take the same in all of them.

    Raises ValueError for no trainings, for trainings that differ in more than D, P and b, and for chunks.
    """
    if not trainings:
        fail("trainings", 0, "at least one")
    first, *rest = trainings
    for name in _ALIKE:
        for each in rest:
            if getattr(each, name) != getattr(first, name):
                fail(f"trainings: {name}", getattr(each, name), f"{getattr(first, name)}, as in the others")
    if first.chunks != 1:
        fail("trainings: chunks", first.chunks, "1")
    sizes = sorted({each.microbatch_size for each in trainings})
    seconds = np.array([each.seconds for each in trainings])
    layouts = sorted({(each.data, each.pipeline) for each in trainings})
    others = [_others_apart(each, layouts) if layouts_apart else _others(each) for each in trainings]
    counts = [[*_layers(each, sizes), *_ends(each), *costs] for each, costs in zip(trainings, others, strict=True)]
    relative = np.array(counts) / seconds[:, None]
    rows, columns = relative.shape
    order = _order(sizes, columns)
    return LeastErrors(
        worst=_least(relative, order, np.ones((rows, 1)), np.ones(1)),
        average=_least(relative, order, np.eye(rows), np.full(rows, 1 / rows)),
    )


def _layers(training: MeasuredTraining, sizes: Sequence[int]) -> list[float]:
    """How often a step has the layers on a microbatch of each size."""
    return [_slots(training) / training.pipeline * (training.microbatch_size == size) for size in sizes]


def _ends(training: MeasuredTraining) -> list[float]:
    """How often a step has a sequence's embedding and head, in the first and the last stage and in their fill."""
    size = training.microbatch_size
    return [float(training.num_microbatches * size), float(size * (training.pipeline > 1))]


def _others(training: MeasuredTraining) -> list[float]:
    """How often a step has each other cost."""
    P, D, sends = training.pipeline, training.data, float(training.pipeline > 1)
    slots = sends * _slots(training)
    nodes = max(1.0, D * training.tensor / NODE)
    return [
        *(slots, slots * training.microbatch_size),
        *(1 / P, (1 - 1 / D) / P, (1 - 1 / nodes) / P, 1 - 1 / D),
        1.0,
    ]


def _others_apart(training: MeasuredTraining, layouts: Sequence[tuple[int, int]]) -> list[float]:
    """The same where each layout has its own seconds of a step, a microbatch and a sequence."""
    slots = float(_slots(training))
    costs = (1.0, slots, slots * training.microbatch_size)
    own = (training.data, training.pipeline)
    return [cost * (layout == own) for layout in layouts for cost in costs]


def _slots(training: MeasuredTraining) -> int:
    """Microbatches that pass the last stage, the fill included."""
    return training.num_microbatches + training.pipeline - 1


def _order(sizes: Sequence[int], columns: int) -> Floats:
    """Rows r with r @ seconds <= 0: a larger microbatch takes no less, and a sequence in it no more."""
    rows = np.zeros((2 * (len(sizes) - 1), columns))
    for at in range(len(sizes) - 1):
        rows[2 * at, [at, at + 1]] = 1, -1
        rows[2 * at + 1, [at, at + 1]] = -1 / sizes[at], 1 / sizes[at + 1]
    return rows


def _least(relative: Floats, order: Floats, errors: Floats, weights: Floats) -> float:
    """Least weights @ e for seconds and e of at least 0 with |relative @ seconds - 1| <= errors @ e."""
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    none = np.zeros((len(order), errors.shape[1]))
    found = linprog(
        np.concatenate([np.zeros(relative.shape[1]), weights]),
        A_ub=np.block([[relative, -errors], [-relative, -errors], [order, none]]),
        b_ub=np.concatenate([np.ones(len(relative)), -np.ones(len(relative)), np.zeros(len(order))]),
    )
    return max(0.0, float(found.fun))
