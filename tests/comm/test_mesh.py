"""Processes, coordinates and ranks of the schedule: three things, told apart on meshes whose order is not the usual."""

from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from support.inside import AXES
from support.pool import Pool

from stagewright.comm import (
    Collectives,
    Coordinates,
    Groups,
    MeshPlace,
    ProcessGroupTransport,
    ProcessMesh,
    TensorSpec,
    World,
    link_lanes,
)
from stagewright.schedules import Message, MessageKind

CPU = torch.device("cpu")
BACKWARDS = ProcessMesh(pipe=2, data=2, order=("data", "pipe", "tensor"))  # rank 1 is process 2, rank 2 is process 1


@pytest.mark.thorough
def test_tensor_groups_cover_all_processes_once_and_context_and_expert_groups_all_ranks() -> None:
    for order in permutations(AXES):
        mesh = ProcessMesh(pipe=2, data=2, context=3, expert=2, tensor=2, order=order)
        all_places = [mesh.coordinates(process) for process in range(mesh.num_processes)]
        assert [mesh.process_at(place) for place in all_places] == list(range(48))  # one to one
        assert all_places[1] == Coordinates(0)._replace(**{order[-1]: 1})
        groups = [mesh.members(rank) for rank in range(24)]
        assert sorted(process for group in groups for process in group) == list(range(48))
        for rank, group in enumerate(groups):
            places = [mesh.coordinates(process) for process in group]
            assert [place.tensor for place in places] == [0, 1]
            numbers = {((place.pipe * 2 + place.data) * 3 + place.context) * 2 + place.expert for place in places}
            assert numbers == {mesh.rank_of(process) for process in group} == {rank}
            process, at = MeshPlace(world=World(rank=group[0], size=48), mesh=mesh), places[0]
            for axis, size in (("context", 3), ("expert", 2)):
                parts = [mesh.coordinates(mesh.members(each)[0]) for each in process.ranks_along(axis, rank)]
                assert parts == [at._replace(**{axis: number}) for number in range(size)]
            assert process.replica == ((at.data * 3 + at.context) * 2 + at.expert, 12)
            assert (process.data, process.context, process.expert) == (
                (at.data * 2 + at.expert, 4),
                (at.context, 3),
                (at.expert, 2),
            )


def test_tensor_groups_of_different_sizes() -> None:
    mesh = ProcessMesh(pipe=4, tensor=(2, 1, 3, 1))
    assert [mesh.members(rank) for rank in range(4)] == [(0, 1), (2,), (3, 4, 5), (6,)]
    assert [mesh.rank_of(process) for process in range(7)] == [0, 0, 1, 2, 2, 2, 3]
    assert [mesh.process_at(mesh.coordinates(process)) for process in range(7)] == list(range(7))
    last = MeshPlace(world=World(rank=5, size=7), mesh=mesh)
    assert last.tensor == (2, 3)
    assert [last.process_of(rank) for rank in range(4)] == [0, 2, 5, 6]
    assert last.groups((1, 3)) == [(2, 6)]
    assert last.groups((0, 2)) == [(0, 1, 3, 4, 5)]
    assert (last.name_of(4), last.name_of(6)) == ("process 4 (rank 2, tensor 1)", "process 6 (rank 3)")


def test_an_order_may_leave_context_and_expert_out() -> None:
    assert ProcessMesh(pipe=2, order=("tensor", "data", "pipe")).order == (
        *("tensor", "data", "context"),
        *("expert", "pipe"),
    )


def test_in_one_process_all_ranks_run_on_one_batch() -> None:
    alone = MeshPlace(world=World(rank=0, size=1), mesh=BACKWARDS)
    assert alone.local_ranks == (0, 1, 2, 3)
    assert alone.replica == (0, 1)
    assert {alone.process_of(rank) for rank in range(4)} == {0}


def test_a_mesh_that_is_none() -> None:
    with pytest.raises(
        ValueError, match=r"order=\('pipe', 'pipe', 'data'\): expected the axes, each once, the slowest"
    ):
        ProcessMesh(pipe=2, order=("pipe", "pipe", "data"))
    with pytest.raises(ValueError, match=r"for 2 processes: expected 4 of them"):
        MeshPlace(world=World(rank=0, size=2), mesh=BACKWARDS)
    for wrong in ({"pipe": 3}, {"pipe": 1, "data": 2}, {"pipe": 2, "order": ("tensor", "pipe", "data")}):
        with pytest.raises(ValueError, match="expected a tensor size for each of"):
            ProcessMesh(**wrong, tensor=(2, 1))


def speak_as_ranks() -> list[str]:
    """A message from rank 0 to rank 1, a sum over ranks 0 and 1, a copy from rank 1, under the odd order."""
    place = MeshPlace(world=World(rank=dist.get_rank(), size=4), mesh=BACKWARDS)
    (rank,) = place.local_ranks
    lanes = link_lanes([(0, 1)], Groups(place, device=CPU, timeout=120.0))
    transport = ProcessGroupTransport(rank, lanes, device=CPU, timeout=120.0)
    tensor = torch.tensor([7.0])
    message, specs = Message(MessageKind.ACT, 0, 1, 0), [TensorSpec.of(tensor)]
    complaints = []
    if rank == 0:
        transport.send(message, 1, [tensor], specs)
    elif rank == 1:
        transport.post(message, 0, specs)
        if float(transport.wait(message, 120.0)[0]) != 7.0:
            complaints.append("the message")
    transport.drain(120.0)
    collectives = Collectives(place, device=CPU, timeout=120.0)
    collectives.subgroup((0, 1))
    total = torch.tensor([1.0 + rank])
    if rank < 2:
        collectives.begin_all_reduce(total, what="a sum", ranks=(0, 1))()
    if float(total) != (3.0 if rank < 2 else 1.0 + rank):
        complaints.append(f"rank {rank}: the sum is {total}")
    if float(collectives.broadcast(torch.tensor(float(rank)), 1, what="a copy")) != 1.0:
        complaints.append(f"rank {rank}: the copy")
    return complaints


def test_messages_and_sums_go_by_ranks_of_the_schedule(gloo: Pool) -> None:
    assert gloo.run(speak_as_ranks, ranks=4) == [[]] * 4
