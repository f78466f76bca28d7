"""All-reduces of gradients that several processes hold (replicas, tied weights), overlapping with later backwards.

    a stage's last backward  -> overlapping: the all-reduce of a flat bucket begins as soon as it has all its gradients
    worker runs REDUCE_GRAD  -> begin: those of the others, and of flags
    program has ended        -> wait
    gradients are ready      -> finish: the sums become the gradients

Where ranks divide the optimizer's state, each gets only the sums of its parts (see `shards`). A rank without a gradient
adds zeros; a gradient that no rank has stays None, since optimizers skip such a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from ...comm import Collectives
from ...comm.buckets import BucketSum
from ...schedules import Collective
from ..addition import Addition, BeginSum
from ..shards.shard import ShardedParameter
from .gradients import flags_of, scale_gradients
from .optimizers import differing_options
from .shards import begin_sum


class SharedSum:
    """Gradients of this process that are summed in one REDUCE_GRAD, batch after batch."""

    def __init__(
        self,
        collective: Collective,
        *,
        ranks: Sequence[int],
        parameters: Sequence[tuple[str, nn.Parameter]],  # of the gradients, with names, in the same order on all ranks
        # This rank's parts of these parameters, where each rank needs only a part of the sums; else none.
        parts: Sequence[ShardedParameter],
        collectives: Collectives,
        # Called with the gradients before, where only one member of a tensor group adds its own.
        compare: Callable[[Mapping[str, torch.Tensor | None]], None] | None,
        added: Sequence[Addition] = (),  # to the run, see `Addition.sums`
    ) -> None:
        stages = " and ".join(map(str, collective.stages))
        self._what = f"summing shared gradients (replicas, tied weights) of stage {stages}"
        self._ranks = ranks
        self._names = tuple(name for name, _ in parameters)
        self._parameters = tuple(parameter for _, parameter in parameters)
        self._parts = parts
        self._added = added if len(collective.stages) == 1 else ()  # not for tied weights, between stages
        self._collectives = collectives
        self._compare = compare
        self._device = collectives.device
        self._flags = torch.empty(0)
        self._total = BucketSum(self._parameters, collectives, what=self._what, ranks=ranks)
        buckets = self._total.buckets
        # One order on all ranks, at any time: backwards make gradients of last parameters first.
        self._order = sorted(range(len(buckets)), key=lambda at: -min(buckets[at]))
        self._holder = {i: at for at, bucket in enumerate(buckets) for i in bucket}
        # Whether a backward makes each gradient once, and nothing changes it until `begin`; None: not known yet.
        self._made_once: bool | None = None
        self._made: dict[int, tuple[torch.Tensor, int]] = {}  # by parameter, after its backward, or `_leave`
        self._waits: list[Callable[[], Sequence[torch.Tensor] | None]] = []  # for flags, parts, packed sums
        self._sums: Sequence[torch.Tensor] = ()  # by parameter; none where they are divided

    @contextmanager
    def overlapping(self, factor: float) -> Iterator[None]:
        """Context of the last backward before `begin`, with the same factor: sums begin as gradients are made. Not in
        the first one, which shows whether it adds to a gradient more than once, or a module's hook changes it then; nor
        for parts, packed or compared gradients, and on CUDA: all these begin in `begin`."""
        together = self._parts or self._other or self._compare or self._device.type != "cpu"
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
                    f"add it up after the first: expected once, as with checkpoint(..., use_reentrant=False)"
                )
            missing[self._holder[number]].discard(number)
            while (at := self._following()) is not None and not missing[at]:
                self._leave(at, factor)
                left = [(i, parameters[i].grad) for i in self._total.buckets[at]]
                self._made |= {i: (gradient, gradient._version) for i, gradient in left if gradient is not None}

        with ExitStack() as stack:
            for i in self._holder:
                if parameters[i].requires_grad:  # frozen since
                    stack.enter_context(parameters[i].register_post_accumulate_grad_hook(partial(made, i)))  # type: ignore[no-untyped-call]
            yield
        if self._made_once is None and max(counts.values(), default=0) > 1:
            self._made_once = False

    def _check_unchanged(self) -> None:
        parameters = self._parameters
        for number, (gradient, version) in self._made.items():
            if parameters[number].grad is gradient and gradient._version == version:
                continue
            if self._total.left:
                raise ValueError(
                    f"the gradient of {self._names[number]!r} was changed after its backward, when replicas had begun "
                    f"to add it up: expected such a hook from the first step on, or one of the parameter"
                )
            self._made_once = False
        if self._made and self._made_once is None:
            self._made_once = True
        self._made = {}

    def begin(self, factor: float, options: Mapping[int, int], *, on_through: Callable[[], None]) -> None:
        """Begin the sums of this rank's gradients, times `factor`, which must not be touched before `wait`. `options`:
        by id of a parameter, the checksum of its options: the same on all ranks. `on_through`: called when all ranks'
        gradients are added up."""
        self._check_unchanged()
        gradients = [p.grad for p in self._parameters]
        if self._compare is not None:
            self._compare(dict(zip(self._names, gradients, strict=True)))
        numbers = [float(options.get(id(p), 0)) for p in self._parameters]
        note = [*numbers, *(number**2 for number in numbers)]
        self._flags = flags_of(self._names, gradients, note, device=self._device)
        other = self._other
        together = bool(self._parts) or other is not None
        while not together and (at := self._following()) is not None:
            self._leave(at, factor)
        of_flags = None if together else on_through  # the last of all
        begin, what, ranks = self._collectives.begin_all_reduce, self._what, self._ranks
        self._waits.append(begin(self._flags, what=what, ranks=ranks, on_through=of_flags))
        if together:
            scale_gradients(gradients, factor)
        if self._parts:
            self._waits.append(begin_sum(self._parts, ranks, self._collectives, what=what, on_through=on_through))
        elif other is not None:
            named = dict(zip(self._names, map(_whole, self._parameters), strict=True))
            self._waits.append(other(named, self._collectives, ranks=ranks, what=what))

    @property
    def _other(self) -> BeginSum | None:
        return next((begin for each in self._added if (begin := each.sums) is not None), None)

    def _following(self) -> int | None:
        """Number of the next bucket to be summed; None after the last."""
        count = len(self._total.left)
        return self._order[count] if count < len(self._order) else None

    def _leave(self, at: int, factor: float) -> None:
        parameters = [self._parameters[i] for i in self._total.buckets[at]]
        scale_gradients([p.grad for p in parameters], factor)
        self._total.leave(at, [_whole(p) for p in parameters])

    def wait(self) -> None:
        """Block until all sums are complete. Raises PipelineTimeout or PeerLost, with the ranks waited for."""
        self._sums = self._total.wait() if self._total.left else ()
        while self._waits:
            self._sums = self._waits.pop(0)() or self._sums

    def finish(self) -> set[str]:
        """Make the sums the gradients (of this rank's parts for divided parameters); returns the names of parameters
        that have one. Raises ValueError where ranks would update them differently."""
        present, totals, squares = self._flags.view(3, -1)
        differing = (len(self._ranks) * squares != totals.square()).nonzero().flatten().tolist()
        if differing:  # the same on all ranks, so that all raise
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
    return torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad
