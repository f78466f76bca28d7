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
from typing import Any

import torch
from torch import nn

from ...comm import Collectives, LinkCodecs, TensorSpec
from ...comm.codecs import exact_type, num_bytes, orthonormal, product, start_matrix, unpack, wire_specs
from ...schedules import Collective
from ..shards.split import ShardedParameter
from .gradients import Flat, FlatGradients, flatten, scale_gradients, unflatten
from .options import differing_options
from .shards import begin_sum


class SharedSum:
    """Gradients of this process that are summed in one REDUCE_GRAD, batch after batch.

    Arguments:
        parameters: whose gradients they are, with their names, in the same order on all of them.
        parts: where each rank needs a part of the sums alone: this rank's of these parameters; else none.
        compare: is told of the gradients before, where of a tensor group those of one member alone are summed.
        codecs: that pack what is summed for one stage, if they say so.
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
        codecs: LinkCodecs | None = None,
    ) -> None:
        stages = " and ".join(map(str, collective.stages))
        self._what = f"summing shared gradients (replicas, tied weights) of stage {stages}"
        self._ranks = ranks
        self._flat = FlatGradients(parameters)
        self._parts = parts
        self._codecs = codecs if len(collective.stages) == 1 else None  # tied weights' go between stages, too
        self._collectives = collectives
        self._compare = compare
        self._device = collectives.device
        self._flags = torch.empty(0)
        # One order on all ranks, whenever a bucket leaves on each: backwards make gradients of last parameters first.
        self._order = sorted(range(len(self._flat.buckets)), key=lambda at: -min(self._flat.buckets[at]))
        self._holder = {i: at for at, bucket in enumerate(self._flat.buckets) for i in bucket}
        # Whether a backward makes each gradient at once, and nothing changes it until `begin`; None: nobody has looked.
        self._made_once: bool | None = None
        self._made: dict[int, tuple[torch.Tensor, int]] = {}  # by parameter, as the backward, or `_leave`, has left it
        self._totals: dict[int, torch.Tensor] = {}  # by bucket
        self._waits: list[Callable[[], None]] = []
        self._buffers: dict[int, torch.Tensor] = {}  # by bucket

    @contextmanager
    def beside(self, factor: float) -> Iterator[None]:
        """Within, the last backward in front of `begin`, with the same factor: gradients leave as they are made.

        Not in the first one, which shows whether it adds to a gradient more than once, or a hook of a module changes it
        then; nor parts, what is packed or compared, and what CUDA makes: these all leave in `begin`.
        """
        together = bool(self._parts) or self._is_packed or self._compare is not None or self._device.type != "cpu"
        if together or self._made_once is False:
            yield
            return
        parameters, counts = self._flat.parameters, Counter[int]()
        missing = [set(bucket) for bucket in self._flat.buckets]

        def made(number: int, parameter: torch.Tensor) -> None:
            counts[number] += 1
            if parameter.grad is None or parameter.grad.is_sparse:
                return
            if self._made_once is None:
                self._made[number] = parameter.grad, parameter.grad._version
                return
            if self._holder[number] in self._totals:
                raise ValueError(
                    f"the gradient of {self._flat.names[number]!r} was made twice in a backward, and replicas began to "
                    f"add it up behind the first: expected once, as with checkpoint(..., use_reentrant=False)"
                )
            missing[self._holder[number]].discard(number)
            while len(self._totals) < len(self._order) and not missing[at := self._order[len(self._totals)]]:
                self._leave(factor)
                left = [(i, parameters[i].grad) for i in self._flat.buckets[at]]
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
        parameters = self._flat.parameters
        for number, (gradient, version) in self._made.items():
            if parameters[number].grad is gradient and gradient._version == version:
                continue
            if self._totals:
                raise ValueError(
                    f"the gradient of {self._flat.names[number]!r} was changed behind its backward, when replicas had "
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
        parameters = self._flat.parameters
        if self._compare is not None:
            self._compare({name: p.grad for name, p in zip(self._flat.names, parameters, strict=True)})
        numbers = torch.tensor([options.get(id(p), 0) for p in parameters], dtype=torch.float64, device=self._device)
        self._flags = torch.cat([self._flat.flags([p.grad for p in parameters]), numbers, numbers.square()])
        together = bool(self._parts) or self._is_packed
        if together:
            scale_gradients([p.grad for p in parameters], factor)
        while not together and len(self._totals) < len(self._order):
            self._leave(factor)
        self._waits.append(self._begin_sum(self._flags, None if together else on_through))  # the last of all
        if self._parts:
            self._waits.append(
                begin_sum(self._parts, self._ranks, self._collectives, what=self._what, on_through=on_through)
            )
        elif self._is_packed:
            buckets, codecs = self._flat.buckets, self._codecs
            assert codecs is not None
            gradients = [torch.zeros_like(p.detach()) if p.grad is None else p.grad for p in parameters]
            named = dict(zip(self._flat.names, gradients, strict=True))
            wait = begin_packed_sum(codecs, named, self._collectives, ranks=self._ranks, what=self._what)

            def take() -> None:
                sums = wait()
                self._totals = {at: flatten([sums[i] for i in bucket]) for at, bucket in enumerate(buckets)}

            self._waits.append(take)

    @property
    def _is_packed(self) -> bool:
        return self._codecs is not None and self._codecs.data is not None and not self._codecs.is_paused

    def _begin_sum(self, total: torch.Tensor, on_through: Callable[[], None] | None = None) -> Callable[[], None]:
        return self._collectives.begin_all_reduce(total, what=self._what, ranks=self._ranks, on_through=on_through)

    def _leave(self, factor: float) -> None:
        """The next bucket's gradients, times `factor`."""
        at = self._order[len(self._totals)]
        parameters = [self._flat.parameters[i] for i in self._flat.buckets[at]]
        scale_gradients([p.grad for p in parameters], factor)
        total = self._totals[at] = self._flatten(at, parameters)
        self._waits.append(self._begin_sum(total))

    def wait(self) -> None:
        """Block until all is added up. Raises PipelineTimeout or PeerLost, with the ranks that it is waited for."""
        while self._waits:
            self._waits.pop(0)()

    def finish(self) -> set[str]:
        """The sums become the gradients (of divided parameters: of this rank's parts); returns the names of those which
        have one. Raises ValueError where ranks would do different things with them."""
        present, totals, squares = self._flags.view(3, -1)
        differing = (len(self._ranks) * squares != totals.square()).nonzero().flatten().tolist()
        if differing:  # the same on all ranks, so that none goes on alone
            raise ValueError(differing_options([self._flat.names[position] for position in differing], self._ranks))
        there = present.tolist()
        for part, count in zip(self._parts, there, strict=False):
            if not count:
                part.parameter.grad = None
        for at, total in self._totals.items():  # none where they are divided
            self._put_back(self._flat.buckets[at], total, there)
        self._totals = {}
        return {name for name, count in zip(self._flat.names, there, strict=True) if count}

    def drop(self) -> None:
        self._waits, self._totals, self._made = [], {}, {}

    def _put_back(self, bucket: Sequence[int], total: torch.Tensor, there: Sequence[float]) -> None:
        parameters = [self._flat.parameters[i] for i in bucket]
        own, summed = [], []
        for i, p, part in zip(bucket, parameters, unflatten(total, parameters), strict=True):
            if not there[i]:
                p.grad = None
                continue
            if p.grad is None:
                p.grad = torch.empty_like(p)
            if p.grad.data_ptr() != part.data_ptr():
                own.append(p.grad)
                summed.append(part)
        if own:
            torch._foreach_copy_(own, summed)

    def _flatten(self, at: int, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradients of a bucket in one tensor: one alone is its own, several a copy in memory that is kept from
        batch to batch (on a CPU fresh memory costs more than the copy into it)."""
        gradients = [torch.zeros_like(p.detach()) if p.grad is None else p.grad for p in parameters]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            return gradients[0].view(-1)
        if at not in self._buffers:
            size = sum(p.numel() for p in parameters)
            self._buffers[at] = torch.empty(size, dtype=parameters[0].dtype, device=self._device)
        return flatten(gradients, out=self._buffers[at])


def begin_packed_sum(
    codecs: LinkCodecs, named: Mapping[str, torch.Tensor], collectives: Collectives, *, ranks: Sequence[int], what: str
) -> Callable[[], list[torch.Tensor]]:
    """Begin to sum these tensors over ranks, packed; the answer waits, and returns the sums, the same on all.

    "lowrank": M of each rank, and what it owes, as in PowerSGD: P = sum of M Q, orthonormal; then Q = sum of M^T P, and
    the sum is P Q^T, of which each owes what its mean lacks. Else all get what each has packed. Others go as they are.
    """
    codec, count = codecs.data, len(ranks)
    assert codec is not None
    whole = [x.detach().flatten(1) if x.dim() > 1 else x.detach() for x in named.values()]
    specs = [TensorSpec.of(x)._replace(requires_grad=True) for x in whole]
    keys = ["data" + name if len(wire_specs(codec, x)) > 1 else "" for name, x in zip(named, specs, strict=True)]
    memory, num_whole = codecs.memory, 2 * (count - 1) * num_bytes(specs) // count

    def begin(tensors: Sequence[torch.Tensor], replaced: int) -> Callable[[], list[torch.Tensor]]:
        flat = Flat(tensors)
        totals = flat.pack(tensors)
        waits = [collectives.begin_all_reduce(total, what=what, ranks=ranks) for total in totals]
        codecs.count("data", 2 * (count - 1) * sum(x.nbytes for x in totals) // count, replaced)

        def finish() -> list[torch.Tensor]:
            for wait in waits:
                wait()
            return flat.unpack(totals)

        return finish

    if codec.kind == "lowrank":
        exact = {i: whole[i].to(exact_type(whole[i].dtype)) for i, key in enumerate(keys) if key}
        owed = {i: x + memory.get(keys[i], 0.0) for i, x in exact.items()}
        starts = {i: memory.get("start" + keys[i], start_matrix(x, int(codec.level))) for i, x in owed.items()}
        first = begin([product(owed[i], starts[i]) if i in owed else x for i, x in enumerate(whole)], num_whole)

        def finish() -> list[torch.Tensor]:
            sums = first()
            lefts = {i: orthonormal(sums[i]) for i in owed}
            rights = begin([product(x.T, lefts[i]) for i, x in owed.items()], 0)()
            for (i, x), right in zip(owed.items(), rights, strict=True):
                sums[i] = product(lefts[i], right.T)
                memory[keys[i]] = (x - sums[i] / count).nan_to_num_(0.0, 0.0, 0.0)
                memory["start" + keys[i]] = orthonormal(right)
            return [total.to(x.dtype).view_as(x) for total, x in zip(sums, named.values(), strict=True)]

        return finish
    packed: list[torch.Tensor] = []
    for key, x in zip(keys, whole, strict=True):
        packed += codecs.pack(codec, x, key) if key else [x.contiguous()]
    mine = torch.cat([x.view(-1).view(torch.uint8) for x in packed])
    wait = collectives.exchange([[mine]] * count, [len(mine)] * count, what=what, ranks=ranks)
    codecs.count("data", (count - 1) * len(mine), num_whole)

    def add() -> list[torch.Tensor]:
        sums = [torch.zeros_like(x) for x in named.values()]
        for bytes_of_one in wait():
            parts = torch.split(bytes_of_one if len(bytes_of_one) else mine, [x.nbytes for x in packed])
            rest = iter([part.clone().view(x.dtype) for part, x in zip(parts, packed, strict=True)])
            for total, spec in zip(sums, specs, strict=True):
                found = tuple(next(rest) for _ in wire_specs(codec, spec))
                total += (found[0] if len(found) == 1 else unpack(codec, found, spec)).view_as(total)
        return sums

    return add
