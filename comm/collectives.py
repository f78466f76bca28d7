"""Collectives between the processes of a run, each with a time-out whose error names what was waited for."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from .failures import Guard, PeerLost, PipelineError, PipelineTimeout, short_reason
from .groups import Groups
from .mesh import MeshPlace
from .process_group import break_group
from .sealed import compact
from .transport import memory_of

T = TypeVar("T")

_BACKEND_ERROR = re.compile(r"gloo|nccl|timed out|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)

_EVER = timedelta(days=365)
_FILLED = 1.25  # most of the bytes of parts that are filled up to equal sizes, times those of the parts
_Options = dist.AllreduceOptions | dist.AllToAllOptions | AllgatherOptions | dist.ReduceScatterOptions


class Collectives:
    """All-reduce, broadcast and gather over all processes, or over some of them. In a single process they do nothing.

    Ranks are those of the schedule: a collective over ranks runs in each plane, that is among the processes of one
    tensor coordinate; where tensor groups differ in size, their first members represent them. A collective over the
    tensor group runs among the processes of this rank.

    The constructor and `subgroup` are collective: they make process groups, so that their time-out is the run's.
    `groups` makes those of the links, too.
    """

    def __init__(self, place: MeshPlace, *, device: torch.device, timeout: float, guard: Guard | None = None) -> None:
        self._place = place
        world = place.world
        # Number of this process, how many there are, whether it is the only one
        self.rank, self.size, self.alone = world.rank, world.size, not world.distributed
        self.device = device  # of the tensors that it is given
        self._timeout = timeout
        self._guard = guard or Guard(None)  # it knows whether a missing process has failed
        self.groups = Groups(place, device=device, timeout=timeout, guard=self._guard)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._gathers: Counter[tuple[int, ...]] = Counter()  # by group
        self.last_call = ""  # text for the errors of `gather`, the same in every process
        self._everyone = tuple(range(self.size))
        ranks = range(place.mesh.num_ranks)
        tensor_groups = [place.mesh.members(rank) for rank in ranks]
        self.tensor_members = (0,) if self.alone else _own(self.rank, tensor_groups)
        parts, experts = (
            [group for rank in ranks for group in place.groups(place.ranks_along(axis, rank))]
            for axis in ("context", "expert")
        )
        self.context_members = (0,) if self.alone else _own(self.rank, parts)
        self.expert_members = (0,) if self.alone else _own(self.rank, experts)
        self._make(self._everyone, *(group for group in (*tensor_groups, *parts, *experts) if len(group) > 1))

    def name_of(self, process: int) -> str:
        return self._place.name_of(process)

    def subgroup(self, ranks: Sequence[int]) -> None:
        self._make(*self._place.groups(ranks))

    def all_reduce(self, tensor: torch.Tensor, *, what: str, largest: bool = False) -> None:
        """Sum `tensor` in place over all processes; or take the largest value of each element (without NaN)."""
        if not self.alone:
            op, wire = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, self._on_wire(tensor)
            self._run(lambda group: dist.all_reduce(wire, op, group=group), self._everyone, what)
            _put_back(wire, tensor)

    def begin_all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        what: str,
        ranks: Sequence[int] | None = None,
        on_through: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Begin to sum `tensor` in place, over the ranks or over all processes; the returned function waits. Until then
        `tensor` may not be touched.

        Sums among the same ranks are carried out in order: all ranks must begin them in the same order. The time-out
        counts only while a rank waits, not while it still computes. `on_through`: called when the sum is complete or
        has failed, on another thread (CUDA: at once, on a stream that waits for it)."""
        if ranks is None and self.alone:
            return lambda: None
        processes = self._everyone if ranks is None else self._processes(ranks)
        if ranks is not None and self._place.is_uneven(ranks) and not self.is_first_member:
            tensor.zero_()  # what all members of its group hold counts once
        options, wire = dist.AllreduceOptions(), self._on_wire(tensor)  # of a sum
        values = torch.view_as_real(wire) if tensor.is_complex() else wire
        summed = self._begin(
            lambda group: group.allreduce([values], options), options, processes, what=what, on_through=on_through
        )

        def wait() -> None:
            summed()
            _put_back(wire, tensor)

        return wait

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """`tensor` of rank `source`, its first process, on every process; elsewhere it gives shape and type."""
        if self.alone:
            return tensor
        return self._broadcast(tensor, self._place.process_of(source, tensor=0), self._everyone, what)

    def gather(self, mine: T, *, what: str, ranks: Sequence[int] | None = None) -> list[T]:
        """Values of every process, or of those of these ranks, by number of the process. Raises ValueError on all of
        them unless all are at the same `what`, after the same calls."""
        return self._gather(mine, self._everyone if ranks is None else self._processes(ranks), what)

    def gather_ranks(self, mine: T, *, what: str) -> list[T]:
        """[R] values of the first process of each rank's tensor group, on every process. One rank per process."""
        everyone = self.gather(mine, what=what)
        return [everyone[self._place.process_of(rank, tensor=0)] for rank in range(self._place.mesh.num_ranks)]

    def alike(
        self,
        mine: T,
        # Describes how the values of two processes, each after its number, differ; None: they agree.
        differing: Callable[[int, T, int, T], str | None] = lambda *_: None,
        *,
        what: str,
        problem: str = "",  # an earlier error of this process: then all of them raise it
    ) -> list[T]:
        """Values of every process, by its number. Raises ValueError on all where they differ; the run continues."""
        everyone = self.gather((problem, mine), what=what)
        text = next((its for its, _ in everyone if its), None)
        different: dict[int, T] = {}  # by the first process that gives it
        for process, (_, its) in enumerate(everyone):
            if its not in different.values():
                text = text or next(filter(None, (differing(*one, process, its) for one in different.items())), None)
                different[process] = its
        if text:
            raise self._guard.spared(ValueError(text))
        return [its for _, its in everyone]

    @property
    def is_first_member(self) -> bool:
        """Whether this process is the first of its tensor group, which represents all of them."""
        return self.rank == self.tensor_members[0]

    # Over the tensor group, whose members make the same calls in the same order

    def group_of(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        """Process group of `tensor_members`, `context_members` or `expert_members`; there must be several."""
        return self._groups[members]

    def lost_member(self, error: RuntimeError, module: str = "") -> PipelineError | None:
        """The error to raise for one of an action that came from a collective in a divided module, or in attention of a
        context group; None for others. `module`: name of the one that exchanged."""
        dividing = {*self.tensor_members, *self.expert_members}
        others = sorted({*dividing, *self.context_members} - {self.rank})
        if not others or not _BACKEND_ERROR.search(str(error)):
            return None
        kind = PipelineTimeout if "timed out" in str(error).lower() else PeerLost
        where = "a divided module" if len(dividing) > 1 else "attention of a context group"
        where += f", {module!r}" if module else ""
        return kind(f"in {where}, together with {self._place.names_of(others)} ({short_reason(error)})", peers=others)

    def tensor_sum(self, tensor: torch.Tensor, *, what: str) -> None:
        if len(self.tensor_members) > 1:
            self._run(lambda group: dist.all_reduce(tensor, group=group), self.tensor_members, what)

    def gather_among(self, members: tuple[int, ...], mine: T, *, what: str) -> list[T]:
        """Values of each of `tensor_members` or `expert_members`."""
        return [mine] if len(members) == 1 else self._gather(mine, members, what)

    def tensors_among(self, members: tuple[int, ...], tensor: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        """`tensor`, of one shape and type, of each of `tensor_members` or `context_members`."""
        if len(members) == 1:
            return [tensor]
        mine = tensor.contiguous()
        found = [torch.empty_like(mine) for _ in members]
        into, wire = [memory_of(each).view(torch.uint8) for each in found], memory_of(mine).view(torch.uint8)
        self._run(lambda group: dist.all_gather(into, wire, group=group), members, what)
        return found

    def tensor_first(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """`tensor` of the first member of the tensor group; elsewhere it gives shape and type."""
        if len(self.tensor_members) == 1:
            return tensor
        return self._broadcast(tensor, self.tensor_members[0], self.tensor_members, what)

    # Over ranks that divide tensors among themselves

    def begin_reduce_scatter(
        self,
        # By rank, tensors of one type; of the same sizes on all ranks. What is sent is copied at once.
        parts: Sequence[Sequence[torch.Tensor]],
        *,
        what: str,
        ranks: Sequence[int],
        on_through: Callable[[], None] | None = None,  # as of `begin_all_reduce`
    ) -> Callable[[], torch.Tensor]:
        """Begin to sum part i of all these ranks on the i-th of them; the returned function waits and returns this
        rank's sum, flat.

        NCCL sums along its rings, level by level. gloo's reduce-scatter is an all-reduce, of twice the bytes: there
        each part is sent to its rank, which adds them in the order of the ranks: the same bits each time."""
        processes = self._in_order(ranks)
        own, sizes = processes.index(self.rank), [sum(piece.numel() for piece in part) for part in parts]
        kind = parts[own][0].dtype
        if kind.is_floating_point and self._has_rings(sizes):
            wire = parts[own][0].new_zeros(len(ranks), max(sizes))
            for row, at in enumerate(sorted(range(len(ranks)), key=processes.__getitem__)):
                torch.cat([piece.reshape(-1) for piece in parts[at]], out=wire[row, : sizes[at]])
            total, options = wire.new_empty(max(sizes)), dist.ReduceScatterOptions()  # of a sum
            wait = self._begin(
                lambda group: group._reduce_scatter_base(total, wire.view(-1), options),
                options,
                self._processes(ranks),
                what=what,
                on_through=on_through,
            )

            def scattered() -> torch.Tensor:
                wait()
                return total[: sizes[own]]

            return scattered
        mine = torch.cat([piece.reshape(-1) for piece in parts[own]])
        received = self.exchange(parts, [sizes[own]] * len(ranks), what=what, ranks=ranks, on_through=on_through)

        def added() -> torch.Tensor:
            first, *others = [mine if at == own else its for at, its in enumerate(received())]
            for its in others:
                first.add_(its)
            return first

        return added

    def begin_all_gather(
        self,
        own: Sequence[torch.Tensor],
        sizes: Sequence[int],  # by rank, elements
        *,
        what: str,
        ranks: Sequence[int],
        on_through: Callable[[], None] | None = None,  # as of `begin_all_reduce`
    ) -> Callable[[], list[torch.Tensor]]:
        """Begin to send this rank's tensors, of one type, to all these ranks; the returned function waits and returns
        those of each rank, flat."""
        if not self._has_rings(sizes):
            return self.exchange([own] * len(ranks), sizes, what=what, ranks=ranks, on_through=on_through)
        processes, options = self._in_order(ranks), AllgatherOptions()
        wire = own[0].new_zeros(max(sizes))
        torch.cat([piece.reshape(-1) for piece in own], out=wire[: sizes[processes.index(self.rank)]])
        whole = wire.new_empty(len(ranks), max(sizes))
        into, sent = whole.view(-1).view(torch.uint8), wire.view(torch.uint8)  # backends know few types
        wait = self._begin(
            lambda group: group._allgather_base(into, sent, options),
            options,
            self._processes(ranks),
            what=what,
            on_through=on_through,
        )
        row = {process: at for at, process in enumerate(sorted(processes))}

        def received() -> list[torch.Tensor]:
            wait()
            return [whole[row[process], :size] for process, size in zip(processes, sizes, strict=True)]

        return received

    def exchange(
        self,
        # By rank, tensors of one type that travel as one; this rank's own are ignored.
        parts: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[int],  # by rank, the number of elements received from it; this rank's own is ignored
        *,
        what: str,
        ranks: Sequence[int],
        on_through: Callable[[], None] | None = None,  # as of `begin_all_reduce`
    ) -> Callable[[], list[torch.Tensor]]:
        """Begin to send a different part to each of these ranks (all-to-all); the returned function waits and returns
        what each of them sent. What is sent is copied at once."""
        processes, own = self._in_order(ranks), self.rank
        order = sorted(range(len(ranks)), key=processes.__getitem__)  # torch numbers the members of a group so
        kind, none = parts[0][0].dtype, parts[0][0].new_empty(0)
        pieces = [[piece.reshape(-1) for piece in parts[i]] if processes[i] != own else [] for i in order]
        outgoing = [sum(piece.numel() for piece in each) for each in pieces]
        incoming = [sizes[i] if processes[i] != own else 0 for i in order]
        wire = torch.cat([none, *chain.from_iterable(pieces)]).view(torch.uint8)  # backends know few types
        wire = wire.to(self.groups.wire)
        del pieces
        received = torch.empty(sum(incoming), dtype=kind, device=self.groups.wire)
        width, into = received.element_size(), received.view(torch.uint8)
        takes, gives = ([width * size for size in sizes] for sizes in (incoming, outgoing))
        options = dist.AllToAllOptions()
        arrived = self._begin(
            lambda group: group.alltoall_base(into, wire, takes, gives, options),
            options,
            self._processes(ranks),
            what=what,
            on_through=on_through,
        )

        def wait() -> list[torch.Tensor]:
            arrived()
            by_index = dict(zip(order, torch.split(received.to(self.device), incoming), strict=True))
            return [by_index[i] for i in range(len(ranks))]

        return wait

    def by_rank(self, mine: T, *, what: str) -> dict[int, T]:
        """Values of the processes of this plane's ranks, on every process; in one process its own for every rank."""
        given = self.gather(mine, what=what)
        return {rank: given[self._place.process_of(rank)] for rank in range(self._place.mesh.num_ranks)}

    def abort(self) -> None:
        """After an error: fail the collectives in which others wait for this rank."""
        for processes, group in self._groups.items():
            if self.rank in processes:
                break_group(group, self.groups.wire)

    def close(self) -> None:
        """Destroy all groups, those of the links too. No process may still wait for another in them."""
        self._groups.clear()
        self.groups.close()

    def _begin(
        self,
        collective: Callable[[dist.ProcessGroup], dist.Work],
        options: _Options,
        processes: tuple[int, ...],
        *,
        what: str,
        on_through: Callable[[], None] | None,
    ) -> Callable[[], None]:
        """Begin a collective, given its own options, which only times out while it is waited for; the returned function
        waits. With NCCL waiting does not block the host: its own watchdog ends what takes too long."""
        options.asyncOp, limit = True, list[timedelta]()
        if self.groups.backend != "nccl":
            options.timeout, limit = _EVER, [timedelta(seconds=self._timeout)]
        work = self._run(collective, processes, what)
        _tell(work, on_through)

        def wait() -> None:
            self._run(lambda _: work.wait(*limit), processes, what)

        return wait

    def _has_rings(self, sizes: Sequence[int]) -> bool:
        """Whether parts of these sizes travel as equal ones, filled up with zeros, in the backend's own collectives."""
        return self.groups.backend == "nccl" and len(sizes) * max(sizes) <= _FILLED * sum(sizes)

    def _in_order(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._place.process_of(rank) for rank in ranks)

    def _processes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return _own(self.rank, self._place.groups(ranks))

    def _make(self, *wanted: Sequence[int]) -> None:
        if self.alone:
            return
        missing = [each for each in dict.fromkeys(tuple(sorted(one)) for one in wanted) if each not in self._groups]
        self._groups.update(zip(missing, self.groups.make(*missing), strict=True))

    def _broadcast(self, tensor: torch.Tensor, source: int, processes: tuple[int, ...], what: str) -> torch.Tensor:
        own = tensor if self.rank == source else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.groups.wire)
        buffer = own.to(self.groups.wire).contiguous()
        wire = memory_of(buffer).view(torch.uint8)  # backends know few types
        self._run(lambda group: dist.broadcast(wire, src=source, group=group), processes, what)
        return buffer.to(self.device)

    def _gather(self, mine: T, processes: tuple[int, ...], what: str) -> list[T]:
        if self.alone:
            return [mine]
        self._gathers[processes] += 1
        own = f"{what!r} (number {self._gathers[processes]} of what they gather){self.last_call}"
        pickles = [packed := compact((own, mine))] * len(processes)
        self._run(lambda group: dist.all_gather_object(pickles, packed, group=group), processes, what)
        everyone: list[tuple[str, T]] = [pickle.loads(each) for each in pickles]
        for process, (its, _) in zip(processes, everyone, strict=True):
            if its != own:
                me, other = self.name_of(self.rank), self.name_of(process)
                raise ValueError(
                    f"{me} is at {own}, and {other} at {its}: expected the same calls, in the same order, in every "
                    f"process"
                )
        return [given for _, given in everyone]

    def _on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.groups.wire, copy=True) if self.groups.is_staged else tensor

    def _run(self, collective: Callable[[dist.ProcessGroup], T], processes: tuple[int, ...], what: str) -> T:
        group = self._groups[processes]
        return self.groups.as_one(lambda: collective(group), what=what, processes=processes)


def _tell(work: dist.Work, on_through: Callable[[], None] | None) -> None:
    if on_through is not None:
        work.get_future().add_done_callback(lambda _: on_through())


def _put_back(wire: torch.Tensor, tensor: torch.Tensor) -> None:
    if wire is not tensor:
        tensor.copy_(wire)


def _own(process: int, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return next(tuple(sorted(group)) for group in groups if process in group)
