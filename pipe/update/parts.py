"""Parts of a stage's parameters on one rank: the optimizer holds a part where others hold the rest of the parameter.

gradients   [all of them] --exchange--> sum of this part                     (a reduce-scatter)
optimizer   steps the part
weights     the part --exchange--> [all of them] on every rank               (an all-gather)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ...comm import Collectives
from ..parallel.division import Division
from ..parallel.part import Part
from .gradients import buckets_of, flatten, unflatten


class StageParts:
    """The parts of one stage's parameters on one rank.

    Arguments:
        parts: by name, in the same order on all ranks of the stage.
        several: names of those that other stages of this rank use, too.
    """

    def __init__(
        self,
        stage: int,
        rank: int,
        parts: Mapping[str, Part],
        collectives: Collectives,
        *,
        several: Collection[str],
    ) -> None:
        self.stage = stage
        self._several = frozenset(several)
        self.parts = parts
        self._rank = rank
        self._collectives = collectives
        self._all = list(parts.values())
        self._ranks = self._all[0].division.ranks if self._all else ()

    @property
    def are_shared(self) -> bool:
        """Whether other stages of this rank use some of them."""
        return bool(self._several)

    def begin_gather(self, *, on_through: Callable[[], None] | None = None) -> Callable[[], None]:
        """Begin to bring the parts of all ranks together; the answer waits, and puts them into the parameters.

        Arguments:
            on_through: as of `Collectives.exchange`, for the last of what is exchanged.
        """
        self.make_room()
        pairs = [(part.parameter.data, part.whole.data) for part in self._all]
        return self._begin(self._all, pairs, what=f"gathering weights of stage {self.stage}", on_through=on_through)

    def make_room(self) -> None:
        """The whole parameters are there, of which this rank's parts alone have values."""
        for part in self._all:
            part.make_room()

    def take(self) -> None:
        """The parts become what the whole parameters hold."""
        for part in self._all:
            part.take()

    def let_go(self, *, all_of_them: bool = False) -> None:
        """Keep the parts alone, where they stand apart; but what other stages use, too, stays whole at first."""
        for part in self._all:
            if all_of_them or part.name not in self._several:
                part.let_go()

    def gather_gradients(self, names: Collection[str]) -> None:
        """The gradients of these parameters become whole, on the parameters."""
        parts = [part for part in self._all if part.name in names]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in parts:
            full = torch.empty_like(part.whole)
            own = part.of(full)
            if part.parameter.grad is not None:
                own.copy_(part.parameter.grad)
            pairs.append((own, full))
        self._begin(parts, pairs, what="gathering gradients")()
        for part, (_, full) in zip(parts, pairs, strict=True):
            part.whole.grad, part.parameter.grad = full, None

    def _begin(
        self,
        parts: Sequence[Part],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        what: str,
        on_through: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """An all-gather; of each part, this rank's tensor and the full one, which gets those of the others."""
        buckets = buckets_of([part.whole for part in parts])
        return together(
            [
                self._begin_bucket(
                    [parts[i] for i in bucket],
                    [pairs[i] for i in bucket],
                    what,
                    on_through if bucket is buckets[-1] else None,
                )
                for bucket in buckets
            ]
        )

    def _begin_bucket(
        self,
        parts: Sequence[Part],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        what: str,
        on_through: Callable[[], None] | None,
    ) -> Callable[[], None]:
        views = [
            [part.division.view(full, rank) for part, (_, full) in zip(parts, pairs, strict=True)]
            for rank in self._ranks
        ]
        wait = self._collectives.exchange(
            [[own for own, _ in pairs]] * len(self._ranks),
            [sum(view.numel() for view in there) for there in views],
            what=what,
            ranks=self._ranks,
            on_through=on_through,
        )

        def finish() -> None:
            for rank, there, received in zip(self._ranks, views, wait(), strict=True):
                if rank != self._rank:
                    torch._foreach_copy_(there, unflatten(received, there))

        return finish


class DividedSum:
    """Sums of gradients that several ranks hold, each of which needs a part alone: a reduce-scatter.

    Arguments:
        ranks: that hold the parameters, ascending.
        divisions: by rank, of these parameters by name.
        parts: this rank's, in the same order on all ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        divisions: Mapping[int, Mapping[str, Division]],
        parts: Sequence[Part],
        collectives: Collectives,
    ) -> None:
        self.ranks = tuple(ranks)
        self.parts = tuple(parts)
        self._rank = rank
        self._collectives = collectives
        self._divisions = [[divisions[each][part.name] for part in parts] for each in ranks]
        self._buckets = buckets_of([part.whole for part in parts])

    def begin(self, *, what: str, on_through: Callable[[], None]) -> Callable[[], None]:
        """Begin; the answer waits, and leaves the sums with the parts. A rank to which no gradient came gives zeros.

        Arguments:
            on_through: as of `Collectives.exchange`, for the last of what is exchanged.
        """
        return together(
            [self._begin(bucket, what, on_through if bucket is self._buckets[-1] else None) for bucket in self._buckets]
        )

    def _begin(self, bucket: Sequence[int], what: str, on_through: Callable[[], None] | None) -> Callable[[], None]:
        parts = [self.parts[i] for i in bucket]
        grads = [torch.zeros_like(p.whole) if p.whole.grad is None else p.whole.grad for p in parts]
        for part in parts:
            part.whole.grad = None
        own = [part.of(grad).clone() for part, grad in zip(parts, grads, strict=True)]  # the rest of `grads` goes
        wait = self._collectives.exchange(
            [
                [there[i].view(grad, rank) for i, grad in zip(bucket, grads, strict=True)]
                for rank, there in zip(self.ranks, self._divisions, strict=True)
            ],
            [sum(part.numel() for part in own)] * len(self.ranks),
            what=what,
            ranks=self.ranks,
            on_through=on_through,
        )

        def finish() -> None:
            total: torch.Tensor | None = None
            for rank, received in zip(self.ranks, wait(), strict=True):  # in their order: the same bits each time
                flat = flatten(own) if rank == self._rank else received
                total = flat if total is None else total.add_(flat)
            assert total is not None
            for part, gradient in zip(parts, unflatten(total, own), strict=True):
                part.parameter.grad = None if part.is_empty else gradient

        return finish


def together(waits: list[Callable[[], None]]) -> Callable[[], None]:
    """Wait for all of them."""

    def wait() -> None:
        while waits:
            waits.pop(0)()  # with what it holds

    return wait
