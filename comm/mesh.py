"""Positions of processes: the world, the mesh that its processes form, and the ranks of a schedule that each one runs.

    ProcessMesh(pipe=2, data=2, tensor=2), the last axis of its order changes fastest:

    process        0      1      2      3      4      5      6      7
    coordinates    0,0,0  0,0,1  0,1,0  0,1,1  1,0,0  1,0,1  1,1,0  1,1,1      (pipe, data, tensor)
    schedule rank  0      0      1      1      2      2      3      3

    ProcessMesh(pipe=3, tensor=(2, 1, 1)), whose tensor groups differ in size:

    process        0      1      2      3
    schedule rank  0      0      1      2

The `data` replicas pass batches of their own; the `context` replicas of each of them pass the same batch, and compute a
part of the tokens of each sequence. The `expert` replicas pass batches of their own, and hold different experts.

Member t of a group of T receives from member t mod S of a group of S, whichever is larger:

    2 -> 1    member 0 ──> member 0    (member 1 has the same, and sends nothing)
    1 -> 2    member 0 ─┬> member 0
                        └> member 1

The launcher starts processes. A schedule's rank is a row of the schedule: a position along the pipeline in one of its
replicas. The processes of a tensor group run the same rank; in one process all ranks run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from numbers import Integral
from typing import NamedTuple

AXES = ("pipe", "data", "context", "expert", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of the run: this one is `rank` of `size` (0 of 1 where all ranks are in-process)."""

    rank: int
    size: int

    @property
    def distributed(self) -> bool:
        return self.size > 1


class Coordinates(NamedTuple):
    pipe: int
    data: int = 0
    context: int = 0
    expert: int = 0
    tensor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """Sizes of the axes: `pipe` ranks along the pipeline, `data` x `context` x `expert` replicas of it, `tensor`
    processes of each rank.

    >>> ProcessMesh(pipe=2, data=2).coordinates(3), ProcessMesh(pipe=2, data=2).process_at(Coordinates(1, 0))
    (Coordinates(pipe=1, data=1, context=0, expert=0, tensor=0), 2)
    """

    pipe: int
    data: int = 1
    context: int = 1
    expert: int = 1
    # A number for each rank, where they differ; then the ranks are of one replica, in order.
    tensor: int | tuple[int, ...] = 1
    # The axes from the slowest to the fastest as process numbers grow; "context" and "expert" may be left out.
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", _read_order(self.order))
        plain = self.num_replicas == 1 and self.order == AXES and len(self.tensor_sizes) == self.pipe
        if not isinstance(self.tensor, int) and not plain:
            raise ValueError(f"{self}: expected a tensor size for each of {self.pipe} ranks, one replica and no order=")

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """[R] processes of each rank."""
        return (self.tensor,) * self.num_ranks if isinstance(self.tensor, int) else self.tensor

    @property
    def num_processes(self) -> int:
        return sum(self.tensor_sizes)

    @property
    def num_ranks(self) -> int:
        return self.pipe * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline: ranks of the schedule at each position along it."""
        return self.data * self.context * self.expert

    @property
    def is_line(self) -> bool:
        return self.tensor == 1 and all(self.rank_of(process) == process for process in range(self.num_processes))

    def coordinates(self, process: int) -> Coordinates:
        found = {}
        if not isinstance(self.tensor, int):
            ends = [*accumulate(self.tensor)]
            rank = bisect_right(ends, process)
            return Coordinates(pipe=rank, tensor=process - ends[rank] + self.tensor[rank])
        for axis in reversed(self.order):
            process, found[axis] = divmod(process, self._size(axis))
        return Coordinates(**found)

    def process_at(self, at: Coordinates) -> int:
        if not isinstance(self.tensor, int):
            return sum(self.tensor[: at.pipe]) + at.tensor
        process = 0
        for axis in self.order:
            process = process * self._size(axis) + getattr(at, axis)
        return process

    def rank_of(self, process: int) -> int:
        """The schedule's rank that a process runs: replicas of a position along the pipeline in a row."""
        at = self.coordinates(process)
        return ((at.pipe * self.data + at.data) * self.context + at.context) * self.expert + at.expert

    def members(self, rank: int) -> tuple[int, ...]:
        """The processes that run a rank together, its tensor group.

        >>> ProcessMesh(pipe=3, tensor=(2, 1, 1)).members(0)
        (0, 1)
        """
        above, expert = divmod(rank, self.expert)
        above, context = divmod(above, self.context)
        pipe, data = divmod(above, self.data)
        size = self.tensor if isinstance(self.tensor, int) else self.tensor[rank]
        return tuple(self.process_at(Coordinates(pipe, data, context, expert, t)) for t in range(size))

    def _size(self, axis: str) -> int:
        return self.tensor_sizes[0] if axis == "tensor" else int(getattr(self, axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """A process on its mesh. In one process (a world of one) all ranks of the schedule run. `shares_batch`: whether all
    replicas pass one batch, as those of a plan do."""

    world: World
    mesh: ProcessMesh
    shares_batch: bool = False

    def __post_init__(self) -> None:
        if self.world.distributed and self.world.size != self.mesh.num_processes:
            raise ValueError(f"{self.mesh} for {self.world.size} processes: expected {self.mesh.num_processes} of them")

    @classmethod
    def line(cls, world: World) -> MeshPlace:
        """A pipeline over all processes: ranks are processes."""
        return cls(world=world, mesh=ProcessMesh(pipe=world.size))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return (self.mesh.rank_of(self.world.rank),) if self.world.distributed else tuple(range(self.mesh.num_ranks))

    @property
    def replica(self) -> tuple[int, int]:
        """(number, count) among the replicas of the schedule with batches, or parts of sequences, of their own; (0, 1)
        in one process."""
        if not self.world.distributed or self.shares_batch:
            return self.context
        return self.mesh.rank_of(self.world.rank) % self.mesh.num_replicas, self.mesh.num_replicas

    @property
    def data(self) -> tuple[int, int]:
        """(number, count) of the replica, among those with batches of their own, whose batch this process passes; (0,
        1) in one process."""
        at, mesh, is_own = self._coordinates, self.mesh, self.world.distributed and not self.shares_batch
        return (at.data * mesh.expert + at.expert, mesh.data * mesh.expert) if is_own else (0, 1)

    @property
    def context(self) -> tuple[int, int]:
        """(number, count) of this process's part of each sequence; (0, 1) in one process."""
        return (self._coordinates.context, self.mesh.context) if self.world.distributed else (0, 1)

    @property
    def expert(self) -> tuple[int, int]:
        """(number, count) of this process among those that divide experts; (0, 1) in one process."""
        return (self._coordinates.expert, self.mesh.expert) if self.world.distributed else (0, 1)

    def ranks_along(self, axis: str, rank: int) -> range:
        """Ranks that run the same stages on the other parts of the same sequences ("context"), or with the other
        experts ("expert"), itself among them."""
        step, size = (self.mesh.expert, self.mesh.context) if axis == "context" else (1, self.mesh.expert)
        first = rank - rank // step % size * step
        return range(first, first + size * step, step)

    @property
    def tensor(self) -> tuple[int, int]:
        """(number, count) in the tensor group of this process; (0, 1) in one process."""
        if not self.world.distributed:
            return 0, 1
        return self._coordinates.tensor, self.mesh.tensor_sizes[self.mesh.rank_of(self.world.rank)]

    def process_of(self, rank: int, *, tensor: int | None = None) -> int:
        """The process that runs rank `rank` in a plane. `tensor`: coordinate of the plane; None: that of this process.
        Smaller groups are in several planes."""
        if not self.world.distributed:
            return 0
        members = self.mesh.members(rank)
        return members[(self._coordinates.tensor if tensor is None else tensor) % len(members)]

    def groups(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Groups of processes for a collective over these ranks: one per plane, or, where the sizes of their tensor
        groups differ, one of all.

        >>> place = MeshPlace(world=World(rank=0, size=5), mesh=ProcessMesh(pipe=3, tensor=(2, 2, 1)))
        >>> place.groups((0, 1)), place.groups((0, 2))
        ([(0, 2), (1, 3)], [(0, 1, 4)])
        """
        members = [self.mesh.members(rank) for rank in ranks]
        return [tuple(chain(*members))] if self.is_uneven(ranks) else list(zip(*members, strict=True))

    def is_uneven(self, ranks: Sequence[int] | None = None) -> bool:
        """Whether the tensor groups of these ranks (None: of all) differ in size."""
        sizes = self.mesh.tensor
        return not isinstance(sizes, int) and len({*sizes} if ranks is None else {sizes[rank] for rank in ranks}) > 1

    def name_of(self, process: int) -> str:
        """Name of a process in messages: its rank, and its tensor coordinate where it has one.

        >>> MeshPlace(world=World(rank=0, size=4), mesh=ProcessMesh(pipe=2, tensor=2)).name_of(3)
        'process 3 (rank 1, tensor 1)'
        """
        if self.mesh.is_line:
            return f"rank {process}"
        rank = self.mesh.rank_of(process)
        also = f", tensor {self.mesh.coordinates(process).tensor}" if self.mesh.tensor_sizes[rank] > 1 else ""
        return f"process {process} (rank {rank}{also})"

    def names_of(self, processes: Sequence[int]) -> str:
        if self.mesh.is_line:
            return f"the ranks {', '.join(map(str, processes))}"
        return ", ".join(map(self.name_of, processes))

    @property
    def _coordinates(self) -> Coordinates:
        return self.mesh.coordinates(self.world.rank)


def read_mesh(
    mesh: Mapping[str, int] | None, world: World, *, wanted: int | None, order: Sequence[str] | None = None
) -> ProcessMesh:
    """The mesh that was given, or one pipeline over the world.

    Arguments:
        mesh: sizes by axis; axes left out are 1, but pipe the rest of the processes.
        wanted: P of a given schedule.
        order: the axes, the slowest first; None: `AXES`.

    Raises ValueError for an unknown axis, a tensor axis above 1 in one process, and sizes that do not match the
    processes.
    """
    axes = AXES if order is None else _read_order(order)
    sizes = dict(mesh or {})
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"mesh axis {axis!r}: expected one of {', '.join(AXES)}")
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size!r}: expected a whole number, at least 1")
        sizes[axis] = int(size)
    others = {axis: size for axis in AXES[1:] if (size := sizes.get(axis, 1)) > 1}
    beside = prod(others.values())
    if len(others.keys() - {"data"}) and not world.distributed:
        count, axis = sizes.get("pipe", wanted or 1) * beside, [axis for axis in others if axis != "data"][-1]
        raise ValueError(
            f"mesh={_shown(sizes)} in one process: the members of {'an' if axis == 'expert' else 'a'} {axis} group are "
            f'processes. Expected "{axis}": 1, or {count} processes '
            f"(torchrun --nproc-per-node {count})"
        )
    if "pipe" not in sizes and wanted is None and world.size % beside:
        raise ValueError(
            f"mesh={_shown(others)} on {world.size} processes: expected "
            f"{'a size that divides' if len(others) == 1 else 'sizes whose product divides'} {world.size}"
        )
    found = ProcessMesh(pipe=sizes.get("pipe", wanted or world.size // beside), order=axes, **others)
    if wanted is not None and found.pipe != wanted:
        raise ValueError(
            f'mesh={{"pipe": {found.pipe}}} for a schedule of {wanted} ranks: expected mesh={{"pipe": {wanted}}}'
        )
    if world.distributed and found.num_processes != world.size:
        also = others if world.size % beside == 0 else {}
        fitting = {"pipe": world.size // beside if also else world.size, **also}
        asks, fix = ("mesh", f"mesh={_shown(fitting)}") if wanted is None else ("schedule", "a schedule of as many")
        count, what = found.num_processes, "processes" if "tensor" in others else "ranks"
        raise ValueError(
            f"the {asks} asks for {count} {what} and the process group has {world.size}: expected {fix}, or "
            f"start {count} processes (torchrun --nproc-per-node {count})"
        )
    return found


def _read_order(order: Sequence[str]) -> tuple[str, ...]:
    """All axes in order; "context" and "expert" may be left out, and are next to "data" then."""
    named = [] if isinstance(order, str) or not isinstance(order, Sequence) else [*map(str, order)]
    for axis in ("expert", "context"):
        if axis not in named and "data" in named:
            named.insert(named.index("data") + 1, axis)
    if sorted(named) != sorted(AXES):
        raise ValueError(f"order={order!r}: expected the axes, each once, the slowest first, as in order={AXES!r}")
    return tuple(named)


def _shown(sizes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f'"{axis}": {size}' for axis, size in sizes.items()) + "}"
