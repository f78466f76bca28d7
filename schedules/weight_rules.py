"""Weight rules: which weight version each forward uses.

A stage starts at version 0, and its update u makes version u + 1. The backward of a microbatch uses the version of its
forward, unless a stage keeps one version that changes in between: then it uses the current one.

    rule            version of the forward of microbatch k of batch t (M per batch)     versions kept
    flush           t: all updates before, none within the batch                        1
    2bw             max(t - 1, 0), on every stage                                       2
    stashing        the newest of the stage                                             one for each in flight
    vertical-sync   the newest that the input stage had, on every stage                 one for each in flight
    one-version     the newest of the stage; likewise in the backward                   1

A new rule is a row of `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """A weight rule."""

    name: str  # in `Schedule.weight_rule`
    # of microbatch `index` (of M per batch), as a function of (index, M, newest, at_input): the newest version of its
    # stage before its forward, and the one that the input stage used (if it has run)
    version: Callable[[int, int, int, int], int]
    is_asynchronous: bool = True  # whether batches overlap
    most_versions: int | None = None  # of a stage that a rank may have to keep; None: no limit
    # whether the index of a microbatch alone determines its version: all stages update between the same two batches.
    # Else stages update independently.
    by_batch: bool = False
    # whether weights change between the forward and the backward of a microbatch, which then uses the newest; else it
    # uses the version of its forward
    changes_in_flight: bool = False

    @property
    def updates_may_wait(self) -> bool:
        """Whether an update may come later than right after its gradients."""
        return self.by_batch and self.is_asynchronous

    @property
    def why_no_norm(self) -> str | None:
        """Why gradients cannot be clipped by a norm over all stages, and what to do; None: they can."""
        if self.by_batch:
            return None
        return (
            "its stages update one after the other, before the norm over all of them is known. "
            "Expected schedule='2bw', or max_grad_norm=None"
        )

    @property
    def why_no_ties(self) -> str | None:
        """Why a parameter cannot be on stages of several ranks, and what to do; None: it can."""
        if self.by_batch:
            return None
        return (
            "its stages update at different times, so they would drift apart. "
            "Expected schedule='2bw' or '1f1b', or a model that does not tie them"
        )

    def version_in_backward(self, version: int, newest: int) -> int:
        """The version of a backward whose forward used `version`, when the newest of the stage is `newest`."""
        return newest if self.changes_in_flight else version

    def version_in_stream(self, index: int, num_microbatches: int, *, oldest: int, steady: int) -> int:
        """The version of a forward in a stream that a flush left at version `oldest`; `steady`: in a stream without
        a flush."""
        return self.version(index, num_microbatches, oldest, oldest) if self.by_batch else max(oldest, steady)

    def versions_kept(self, in_use: int) -> int:
        """Versions of a stage that a rank reserves memory for, when its schedule has at most `in_use` in use at
        once."""
        return in_use if self.most_versions is None else self.most_versions

    def updates_per_batch(self, num_microbatches: int, replicas: Sequence[int]) -> int:
        """Updates of a stage per batch by default; each replica contributes to each."""
        return num_microbatches // math.lcm(*replicas) if self.most_versions is None else 1


RULES: Mapping[str, WeightRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            # Every batch ends before the next begins.
            WeightRule(
                name="flush", version=lambda k, M, *_: k // M, is_asynchronous=False, most_versions=1, by_batch=True
            ),
            # 2BW (Narayanan et al., ICML 2021): batch t uses version t - 1. Both versions stay over a flush, too.
            WeightRule(name="2bw", version=lambda k, M, *_: max(k // M - 1, 0), most_versions=2, by_batch=True),
            # Weight stashing (PipeDream, SOSP 2019).
            WeightRule(name="stashing", version=lambda _k, _M, newest, _: newest),
            # Vertical sync (PipeDream, SOSP 2019).
            WeightRule(name="vertical-sync", version=lambda _k, _M, _newest, at_input: at_input),
            # PACI (Elam et al., 2026): a stage updates in place, after the backward that ends an update group.
            WeightRule(
                name="one-version", version=lambda _k, _M, newest, _: newest, most_versions=1, changes_in_flight=True
            ),
        )
    }
)
