"""Weight rules: which weight version each forward uses, and what follows from that. One class a rule.

Version 0 of a stage is there from the start, and its update u makes version u + 1. The backward of a microbatch uses
the version of its forward; only where one version is kept, and changes in between, it uses what is there then.

    rule            version of the forward of microbatch k of batch t (M a batch)       versions kept
    flush           t: all updates before, none within the batch                        1
    2bw             max(t - 1, 0), on every stage                                       2
    stashing        the newest of the stage                                             one for each in flight
    vertical-sync   the newest that the input stage had, on every stage                 one for each in flight
    one-version     the newest of the stage; so in the backward                         1

A new rule is a class here and a name in `RULES`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple


class Seen(NamedTuple):
    """Versions before a forward: the newest of its stage, and the one that the input stage used (if it has run)."""

    newest: int
    at_input: int


class WeightRule(ABC):
    """Decisions of a weight rule. The base is a rule under which each stage updates by itself.

    Attributes:
        name: in `Schedule.weight_rule`.
        is_asynchronous: whether batches overlap.
        most_versions: of a stage that a rank may have to keep; None: no limit.
        changes_in_flight: whether weights change between the forward and the backward of a microbatch, which then uses
            the newest; else it uses the version of its forward.
        updates_may_wait: whether an update may stand later than right after its gradients, since the index of a
            microbatch alone names its version.
        why_no_norm: why gradients cannot be clipped by a norm over all stages, and what to do; None: they can.
        why_no_ties: why a parameter cannot stand on stages of several ranks, and what to do; None: it can.
    """

    name: ClassVar[str]
    is_asynchronous: ClassVar[bool] = True
    most_versions: ClassVar[int | None] = None
    changes_in_flight: ClassVar[bool] = False
    updates_may_wait: ClassVar[bool] = False
    why_no_norm: ClassVar[str | None] = (
        "its stages update one after the other, before the norm over all of them is known. "
        "Expected schedule='2bw', or max_grad_norm=None"
    )
    why_no_ties: ClassVar[str | None] = (
        "its stages update at different times, so they would drift apart. "
        "Expected schedule='2bw' or '1f1b', or a model that does not tie them"
    )

    @abstractmethod
    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        """The version that microbatch `index` (of M a batch) must use, given what stands before its forward."""

    def version_in_backward(self, version: int, newest: int) -> int:
        """The version that a backward uses, whose forward used `version`, when the stage has come to `newest`."""
        return newest if self.changes_in_flight else version

    def version_in_stream(self, index: int, num_microbatches: int, *, oldest: int, steady: int) -> int:
        """The same as `version` in a stream that begins with version `oldest` of each stage, as a flush leaves it.

        Arguments:
            steady: the version in a stream that has run for long.
        """
        return max(oldest, steady)

    def versions_kept(self, in_use: int) -> int:
        """Versions of a stage that a rank makes room for, when its schedule has at most `in_use` in use at once."""
        return in_use

    def updates_per_batch(self, num_microbatches: int, replicas: Sequence[int]) -> int:
        """Updates of a stage in a batch where `update_every` is not given; each replica adds to each."""
        return num_microbatches // math.lcm(*replicas)


class _Fixed(WeightRule):
    """A rule that names versions by the batch: all stages update between the same two batches."""

    why_no_norm = None
    why_no_ties = None
    most_versions: ClassVar[int]

    def version_in_stream(self, index: int, num_microbatches: int, *, oldest: int, steady: int) -> int:
        return self.version(index, num_microbatches, Seen(oldest, oldest))

    def versions_kept(self, in_use: int) -> int:
        return self.most_versions

    def updates_per_batch(self, num_microbatches: int, replicas: Sequence[int]) -> int:
        return 1


class Flush(_Fixed):
    """Every batch ends before the next begins."""

    name = "flush"
    is_asynchronous = False
    most_versions = 1

    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        return index // num_microbatches


class DoubleBuffered(_Fixed):
    """2BW (Narayanan et al., ICML 2021): batch t uses version t - 1. Both versions stay over a flush, too."""

    name = "2bw"
    most_versions = 2
    updates_may_wait = True

    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        return max(index // num_microbatches - 1, 0)


class Stashing(WeightRule):
    """Weight stashing (PipeDream, SOSP 2019): the newest version of the stage."""

    name = "stashing"

    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        return seen.newest


class VerticalSync(WeightRule):
    """Vertical sync (PipeDream, SOSP 2019): on every stage the version that the input stage used."""

    name = "vertical-sync"

    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        return seen.at_input


class OneVersion(WeightRule):
    """PACI (Elam et al., 2026): the newest version of the stage, in its forward and in its backward, and no other.

    A stage updates in place, behind the backward that ends an update group. A forward keeps its activations; the
    backward behind an update reads the new weights.
    """

    name = "one-version"
    most_versions = 1
    changes_in_flight = True

    def version(self, index: int, num_microbatches: int, seen: Seen) -> int:
        return seen.newest

    def versions_kept(self, in_use: int) -> int:
        return 1

    def updates_per_batch(self, num_microbatches: int, replicas: Sequence[int]) -> int:
        return 1


RULES: Mapping[str, WeightRule] = MappingProxyType(
    {rule.name: rule for rule in (Flush(), DoubleBuffered(), Stashing(), VerticalSync(), OneVersion())}
)
