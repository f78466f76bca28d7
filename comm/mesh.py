"""Where processes stand: the world, the mesh that its processes form, and the ranks of a schedule that each one runs.

    Mesh(pipe=2, data=2, tensor=2), the last axis of its order changes fastest:

    process        0      1      2      3      4      5      6      7
    coordinates    0,0,0  0,0,1  0,1,0  0,1,1  1,0,0  1,0,1  1,1,0  1,1,1      (pipe, data, tensor)
    schedule rank  0      0      1      1      2      2      3      3

A process is what the launcher started. A schedule's rank is a row of the schedule: a position along the pipeline in one
of its replicas. The processes of a tensor group run the same rank; in one process all ranks run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of the run: this one is `rank` of `size` (0 of 1 where all ranks are in-process)."""

    rank: int
    size: int

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1


class Coordinates(NamedTuple):
    """Position on each axis of a mesh."""

    pipe: int
    data: int = 0
    tensor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes: `pipe` ranks along the pipeline, `data` replicas of it, `tensor` processes of each rank.

    order: the axes from the slowest to the fastest as process numbers grow.

    >>> Mesh(pipe=2, data=2).coordinates(3), Mesh(pipe=2, data=2).process_at(Coordinates(1, 0))
    (Coordinates(pipe=1, data=1, tensor=0), 2)
    """

    pipe: int
    data: int = 1
    tensor: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order={self.order!r}: expected {', '.join(AXES)}, each once, the slowest first")

    @property
    def num_processes(self) -> int:
        """Product of all sizes."""
        return self.num_ranks * self.tensor

    @property
    def num_ranks(self) -> int:
        """R of the schedule over all replicas."""
        return self.pipe * self.data

    def coordinates(self, process: int) -> Coordinates:
        """Where a process stands."""
        found = {}
        for axis in reversed(self.order):
            process, found[axis] = divmod(process, self._size(axis))
        return Coordinates(**found)

    def process_at(self, at: Coordinates) -> int:
        """The process that stands there."""
        process = 0
        for axis in self.order:
            process = process * self._size(axis) + getattr(at, axis)
        return process

    def rank_of(self, process: int) -> int:
        """The schedule's rank that a process runs: replicas of a position along the pipeline in a row."""
        at = self.coordinates(process)
        return at.pipe * self.data + at.data

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of processes that differ along `axis` alone; they cover all processes, each once.

        >>> Mesh(pipe=2, data=2).groups("pipe")
        ((0, 2), (1, 3))
        """
        others = [each for each in AXES if each != axis]
        sizes = [range(self._size(each)) for each in others]
        return tuple(
            tuple(
                self.process_at(Coordinates(**dict(zip(others, fixed, strict=True)), **{axis: along}))
                for along in range(self._size(axis))
            )
            for fixed in product(*sizes)
        )

    def _size(self, axis: str) -> int:
        return {"pipe": self.pipe, "data": self.data, "tensor": self.tensor}[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """A process on its mesh. In one process (a world of one) all ranks of the schedule run."""

    world: World
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.world.distributed and self.world.size != self.mesh.num_processes:
            raise ValueError(f"{self.mesh} for {self.world.size} processes: expected {self.mesh.num_processes} of them")

    @classmethod
    def line(cls, world: World) -> MeshPlace:
        """A pipeline over all processes: ranks are processes."""
        return cls(world=world, mesh=Mesh(pipe=world.size))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The schedule's ranks that this process runs."""
        return (self.mesh.rank_of(self.world.rank),) if self.world.distributed else tuple(range(self.mesh.num_ranks))

    @property
    def replica(self) -> tuple[int, int]:
        """(number, count) of the data replica whose batch this process passes; the one batch in one process."""
        return (self._coordinates.data, self.mesh.data) if self.world.distributed else (0, 1)

    def process_of(self, rank: int) -> int:
        """The process that a process like this one (of the same tensor coordinate) meets as rank `rank`."""
        if not self.world.distributed:
            return 0
        pipe, data = divmod(rank, self.mesh.data)
        return self.mesh.process_at(Coordinates(pipe, data, self._coordinates.tensor))

    @property
    def _coordinates(self) -> Coordinates:
        return self.mesh.coordinates(self.world.rank)


def read_mesh(mesh: Mapping[str, int] | None, world: World, *, wanted: int | None) -> Mesh:
    """The mesh that was given, or one pipeline over the world.

    Arguments:
        mesh: sizes by axis; the axes left out are 1, and pipe is what the processes leave.
        wanted: P of a schedule that was given whole.

    Raises ValueError for an unknown axis, a tensor axis above 1, and sizes that do not match the processes.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        raise ValueError(f'mesh={mesh!r}: expected sizes by axis, as in mesh={{"pipe": {world.size}}}')
    sizes = dict(mesh or {})
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(f"mesh axis {axis!r}: expected one of {', '.join(AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"mesh axis {axis!r} has size {size!r}: expected a whole number, at least 1")
        if axis == "tensor" and size > 1:
            raise ValueError(
                f"mesh axis {axis!r} has size {size}: tensor parallel groups are not there yet; "
                f'expected 1, as in mesh={{"pipe": {sizes.get("pipe", world.size)}}}'
            )
    data = sizes.get("data", 1)
    if "pipe" not in sizes and wanted is None and world.size % data:
        raise ValueError(
            f'mesh={{"data": {data}}} on {world.size} processes: expected a size that divides {world.size}'
        )
    found = Mesh(pipe=sizes.get("pipe", wanted or world.size // data), data=data)
    if wanted is not None and found.pipe != wanted:
        raise ValueError(
            f'mesh={{"pipe": {found.pipe}}} for a schedule of {wanted} ranks: expected mesh={{"pipe": {wanted}}}'
        )
    if world.distributed and found.num_processes != world.size:
        also = f', "data": {data}' if data > 1 and world.size % data == 0 else ""
        asks, fix = (
            ("mesh", f'mesh={{"pipe": {world.size // data if also else world.size}{also}}}')
            if wanted is None
            else ("schedule", "a schedule of as many")
        )
        count = found.num_processes
        raise ValueError(
            f"the {asks} asks for {count} ranks and the process group has {world.size}: expected {fix}, or "
            f"start {count} processes (torchrun --nproc-per-node {count})"
        )
    return found
