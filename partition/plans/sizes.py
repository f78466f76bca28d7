"""Costs of a plan's stages as functions of a microbatch's size, fitted to what was measured at a few sizes.

    seconds, bytes  =  a + b N L + c N L^2          N samples of length L; a, b, c at least 0

N L is what layers do, one position at a time; N L^2 is attention. One measured size gives b alone, two a and b, three
or more all of them. Beyond the measured sizes the same law is taken to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...schedules.ir import Op
from ..profile import Node, Profile
from ..stage_cost import COUNTED, OFFLOAD, count_again, kind_of
from .record import PlanRecord, PlanStage
from .reorder import input_grad_share

_BYTES = ("activation_bytes", "stash_bytes", "workspace_bytes", "selective_bytes", "keep_less_bytes")
_SECONDS = tuple(
    f"{what}_seconds" for what in ("forward", "backward", "input_grad", "weight_grad", "selective", "keep_less")
)
_LEAST = 1e-9  # [s] of an action, so that every one takes some time


class Size(NamedTuple):
    """Size of a microbatch: samples, and how many elements one of them has in the model's first argument."""

    samples: int
    length: int

    @property
    def tokens(self) -> int:
        return self.samples * self.length


Law = Callable[[Size], float]
Profiles = Mapping[Size, Profile]


def ascending(sizes: Iterable[Size]) -> list[Size]:
    return sorted(sizes, key=lambda size: (size.tokens, size))


def sizes_to_measure(sizes: Sequence[Size]) -> list[Size]:
    """The smallest, the middle and the largest of a batch's sizes, where they differ.

    >>> sizes_to_measure([Size(1, 30), Size(1, 10), Size(2, 20), Size(1, 12)])
    [Size(samples=1, length=10), Size(samples=1, length=30), Size(samples=2, length=20)]
    """
    ordered = ascending(sizes)
    return list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))


def planned_for(profiles: Profiles) -> Profile:
    """One profile to plan with: seconds of the middle size, bytes of the largest, so that what is planned fits."""
    ordered = ascending(profiles)
    middle, largest = profiles[ordered[len(ordered) // 2]], profiles[ordered[-1]]
    nodes = {node.name: node for node in largest.nodes}

    def joined(node: Node) -> Node:
        return replace(node, **{name: getattr(nodes[node.name], name) for name in _BYTES})

    return replace(middle, nodes=tuple(map(joined, middle.nodes)))


def at_size(profiles: Mapping[int, Profile], samples: int) -> Profile:
    """The profile of microbatches of so many samples: as measured, or what grows with their size by its law."""
    if samples in profiles:
        return profiles[samples]

    def grown(values: Sequence[float | None]) -> float | None:
        known = {Size(size, 1): value for size, value in zip(profiles, values, strict=True) if value}
        return fitted(known)(Size(samples, 1)) if len(known) == len(profiles) else values[0]

    first = next(iter(profiles.values()))
    nodes = tuple(
        replace(same[0], **{name: grown([getattr(node, name) for node in same]) for name in (*_SECONDS, *_BYTES)})
        for same in zip(*(profile.nodes for profile in profiles.values()), strict=True)
    )
    whole = grown([profile.step_seconds for profile in profiles.values()])
    return replace(first, nodes=nodes, step_seconds=whole, microbatch_size=samples)


def stage_laws(plan: PlanRecord, profiles: Profiles) -> list[dict[str, Law]]:
    """[S] of a plan that was made with `planned_for` these profiles, each by the size of a microbatch: "forward",
    "input_grad" and "weight_grad" [s], and "held", bytes kept from F to W. What the plan says of a stage holds at the
    middle size (seconds) and at the largest (bytes); profiles say how it changes with the size."""
    ordered = ascending(profiles)
    middle, largest = ordered[len(ordered) // 2], ordered[-1]
    found = []
    for stage, forward, backward in zip(plan.stages, plan.seconds(Op.F), plan.seconds(Op.B), strict=True):
        parts = {size: _measured(stage, profile) for size, profile in profiles.items()}
        own = backward * input_grad_share(stage, profiles[middle])
        known = {
            "forward": (middle, forward),
            "input_grad": (middle, own),
            "weight_grad": (middle, backward - own),
            "held": (largest, parts[largest]["held"] if stage.held is None else stage.held.activations),
        }
        found.append(
            {
                name: _scaled(fitted({size: part[name] for size, part in parts.items()}), at, value)
                for name, (at, value) in known.items()
            }
        )
    return found


def fitted(values: Mapping[Size, float]) -> Law:
    """The law of least squares, relative to the values.

    >>> law = fitted({Size(1, length): 5.0 + 2.0 * length + 0.5 * length**2 for length in (2, 6, 10, 20)})
    >>> round(law(Size(1, 40)), 6), round(law(Size(2, 10)), 6)
    (885.0, 145.0)
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    known = {size: max(value, _LEAST) for size, value in values.items()}
    number = min(3, len({size.tokens for size in known}))
    scale = max(size.tokens for size in known)
    longest = max(size.length for size in known)

    def features(size: Size) -> list[float]:
        tokens = size.tokens / scale
        return {1: [tokens], 2: [1.0, tokens], 3: [1.0, tokens, tokens * size.length / longest]}[number]

    rows = np.array([features(size) for size in known])
    weights = 1.0 / np.array(list(known.values()))
    factors = nnls(rows * weights[:, None], np.ones(len(rows)))[0].tolist()
    return lambda size: max(_LEAST, sum(f * x for f, x in zip(factors, features(size), strict=True)))


def _scaled(law: Law, at: Size, value: float) -> Law:
    """The law's way of growing, through a known value."""
    factor = value / law(at)
    return lambda size: max(_LEAST, factor * law(size))


def _measured(stage: PlanStage, profile: Profile) -> dict[str, float]:
    """A stage's nodes in one profile; in the backward of a recomputed stage the forward runs again."""
    nodes = [node for node in profile.nodes if node.name in set(stage.nodes)]
    forward = sum(node.forward_seconds for node in nodes)
    number = None if stage.recompute == OFFLOAD else count_again(stage.recompute)
    kind = kind_of(stage.recompute)
    again = [node for node in nodes if node.runs_again and kind in COUNTED][:number]
    whole = sum(node.backward_seconds for node in nodes) + sum(node.treated(kind)[1] for node in again)
    whole += forward if kind == "full" else 0.0
    own = whole * input_grad_share(stage, profile)
    stash = sum(node.stash_bytes for node in nodes)
    return {"forward": forward, "input_grad": own, "weight_grad": whole - own, "held": stash}
