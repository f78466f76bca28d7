"""All-reduces of gradients that several processes hold (replicas, tied weights), beside the backwards that follow.

    a stage's last backward  -> beside: a flat bucket leaves as soon as it has all its gradients, each an all-reduce
    worker meets REDUCE_GRAD -> begin: the others leave, and flags
    program is through       -> wait
    gradients are ready      -> finish: the sums are the gradients now

Where ranks divide the optimizer's state, each gets the sums of its parts alone (see `shards`). A rank to which no
gradient came gives zeros; one that came nowhere is left None, since optimizers leave such a parameter alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...comm import Collectives
from ...comm.buckets import BucketSum
from ...schedules import Collective
from ..shards.split import ShardedParameter
from .gradients import flags_of, scale_gradients
from .options import differing_options
from .shards import begin_sum


class OtherSum(Protocol):
    """A way to begin the sum of tensors over ranks, other than all-reduces of buckets."""

    @property
    def is_on(self) -> bool:
        """Whether it begins the sums of this batch."""

    def begin(
        self, named: Mapping[str, torch.Tensor], collectives: Collectives, *, ranks: Sequence[int], what: str
    ) -> Callable[[], list[torch.Tensor]]:
        """The answer waits, and returns the sums, the same on all ranks."""


class SharedSum:
    """Gradients of this process that are summed in one REDUCE_GRAD, batch after batch.

    Arguments:
        parameters: whose gradients they are, with their names, in the same order on all of them.
        parts: where each rank needs a part of the sums alone: this rank's of these parameters; else none.
        compare: is told of the gradients before, where of a tensor group those of one member alone are summed.
        another: way to begin sums of the gradients of one stage, while it is on.
    """

    def __init__(
        self,
        collective: Collective,
        *,
        ranks: Sequence[int],
        parameters: Sequence[tuple[str, nn.Parameter]],
        parts: Sequence[ShardedParameter],
        collectives: Collectives,
        compare: Callable[[Mapping[str, torch.Tensor | None]], None] | None,
        another: OtherSum | None = None,
    ) -> None:
        stages = " and ".join(map(str, collective.stages))
        self._what = f"summing shared gradients (replicas, tied weights) of stage {stages}"
        self._ranks = ranks
        self._names = tuple(name for name, _ in parameters)
        self._parameters = tuple(parameter for _, parameter in parameters)
        self._parts = parts
        self._another = another if len(collective.stages) == 1 else None  # tied weights' go between stages, too
        self._collectives = collectives
        self._compare = compare
        self._device = collectives.device
        self._flags = torch.empty(0)
        self._total = BucketSum(self._parameters, collectives, what=self._what, ranks=ranks)
        buckets = self._total.buckets
        # One order on all ranks, whenever a bucket leaves on each: backwards make gradients of last parameters first.
        self._order = sorted(range(len(buckets)), key=lambda at: -min(buckets[at]))
        self._holder = {i: at for at, bucket in enumerate(buckets) for i in bucket}
        # Whether a backward makes each gradient at once, and nothing changes it until `begin`; None: nobody has looked.
        self._made_once: bool | None = None
        self._made: dict[int, tuple[torch.Tensor, int]] = {}  # by parameter, as the backward, or `_leave`, has left it
        self._waits: list[Callable[[], Sequence[torch.Tensor] | None]] = []  # for flags, parts, packed sums
        self._sums: Sequence[torch.Tensor] = ()  # by parameter; none where they are divided

    @contextmanager
    def beside(self, factor: float) -> Iterator[None]:
        """Within, the last backward in front of `begin`, with the same factor: gradients leave as they are made.

        Not in the first one, which shows whether it adds to a gradient more than once, or a hook of a module changes it
        then; nor parts, what is packed or compared, and what CUDA makes: these all leave in `begin`.
        """
        together = bool(self._parts) or self._is_other or self._compare is not None or self._device.type != "cpu"
        if together or self._made_once is False:
            yield
            return
        parameters, counts = self._parameters, Counter[int]()
        missing = [set(bucket) for bucket in self._total.buckets]

        def made(number: int, parameter: torch.Tensor) -> None:
            counts[number] += 1
            if parameter.grad is None or parameter.grad.is_sparse:
                return
            if self._made_once is None:
                self._made[number] = parameter.grad, parameter.grad._version
                return
            if self._holder[number] in self._total.left:
                raise ValueError(
                    f"the gradient of {self._names[number]!r} was made twice in a backward, and replicas began to "
                    f"add it up behind the first: expected once, as with checkpoint(..., use_reentrant=False)"
                )
            missing[self._holder[number]].discard(number)
            while (at := self._following()) is not None and not missing[at]:
                self._leave(at, factor)
                left = [(i, parameters[i].grad) for i in self._total.buckets[at]]
                self._made |= {i: (gradient, gradient._version) for i, gradient in left if gradient is not None}

        hooks: list[Any] = [
            parameters[i].register_post_accumulate_grad_hook(partial(made, i))  # type: ignore[no-untyped-call]
            for i in self._holder
            if parameters[i].requires_grad  # frozen since
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._made_once is None and max(counts.values(), default=0) > 1:
            self._made_once = False

    def _check_unchanged(self) -> None:
        """Nothing may have changed gradients that left; where none did yet, none will be early if something has."""
        parameters = self._parameters
        for number, (gradient, version) in self._made.items():
            if parameters[number].grad is gradient and gradient._version == version:
                continue
            if self._total.left:
                raise ValueError(
                    f"the gradient of {self._names[number]!r} was changed behind its backward, when replicas had "
                    f"begun to add it up: expected such a hook from the first step on, or one of the parameter"
                )
            self._made_once = False
        if self._made and self._made_once is None:
            self._made_once = True
        self._made = {}

    def begin(self, factor: float, options: Mapping[int, int], *, on_through: Callable[[], None]) -> None:
        """This rank's gradients leave, times `factor`, and must not be touched before `wait`.

        Arguments:
            options: by id of a parameter, a number of what its optimizer does with it: the same on all ranks.
            on_through: is called when all ranks' gradients are added up.
        """
        self._check_unchanged()
        gradients = [p.grad for p in self._parameters]
        if self._compare is not None:
            self._compare(dict(zip(self._names, gradients, strict=True)))
        numbers = [float(options.get(id(p), 0)) for p in self._parameters]
        note = [*numbers, *(number**2 for number in numbers)]
        self._flags = flags_of(self._names, gradients, note, device=self._device)
        together = bool(self._parts) or self._is_other
        while not together and (at := self._following()) is not None:
            self._leave(at, factor)
        of_flags = None if together else on_through  # the last of all
        begin, what, ranks = self._collectives.begin_all_reduce, self._what, self._ranks
        self._waits.append(begin(self._flags, what=what, ranks=ranks, on_through=of_flags))
        if together:
            scale_gradients(gradients, factor)
        if self._parts:
            self._waits.append(begin_sum(self._parts, ranks, self._collectives, what=what, on_through=on_through))
        elif self._is_other and self._another is not None:
            named = dict(zip(self._names, map(_whole, self._parameters), strict=True))
            self._waits.append(self._another.begin(named, self._collectives, ranks=ranks, what=what))

    @property
    def _is_other(self) -> bool:
        return self._another is not None and self._another.is_on

    def _following(self) -> int | None:
        """The bucket that leaves next."""
        count = len(self._total.left)
        return self._order[count] if count < len(self._order) else None

    def _leave(self, at: int, factor: float) -> None:
        """A bucket's gradients, times `factor`."""
        parameters = [self._parameters[i] for i in self._total.buckets[at]]
        scale_gradients([p.grad for p in parameters], factor)
        self._total.leave(at, [_whole(p) for p in parameters])

    def wait(self) -> None:
        """Block until all is added up. Raises PipelineTimeout or PeerLost, with the ranks that it is waited for."""
        self._sums = self._total.wait() if self._total.left else ()
        while self._waits:
            self._sums = self._waits.pop(0)() or self._sums

    def finish(self) -> set[str]:
        """The sums become the gradients (of divided parameters: of this rank's parts); returns the names of those which
        have one. Raises ValueError where ranks would do different things with them."""
        present, totals, squares = self._flags.view(3, -1)
        differing = (len(self._ranks) * squares != totals.square()).nonzero().flatten().tolist()
        if differing:  # the same on all ranks, so that none goes on alone
            raise ValueError(differing_options([self._names[position] for position in differing], self._ranks))
        there = present.tolist()
        for part, count in zip(self._parts, there, strict=False):
            if not count:
                part.parameter.grad = None
        own, summed = [], []
        for i in self._holder if self._sums else ():
            parameter, total = self._parameters[i], self._sums[i]
            if not there[i]:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.data_ptr() != total.data_ptr():
                own.append(parameter.grad)
                summed.append(total)
        if own:
            torch._foreach_copy_(own, summed)
        self.drop()
        return {name for name, count in zip(self._names, there, strict=True) if count}

    def drop(self) -> None:
        self._total.drop()
        self._waits, self._sums, self._made = [], (), {}


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient; zeros where none came."""
    return torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad
