"""Messages of CUDA devices through the host's memory: what waits for what, and the same numbers as without."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import CudaSide, DeviceOf, PipeContextRun, StagedTransport, backend_for
from support.pool import Pool
from support.staged import HostSide, staging
from torch import Tensor, nn

import stagewright as sw
from stagewright.comm import (
    BACKEND,
    Collectives,
    Groups,
    MeshPlace,
    PeerLost,
    ProcessGroupTransport,
    TensorSpec,
    World,
    join_world,
)
from stagewright.schedules import Message, MessageKind

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def act(index: int) -> Message:
    return Message(MessageKind.ACT, 0, 1, index)


class FakeCuda:
    """Streams and events of torch.cuda that write down what is asked of them; tensors stay on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.now, self._names = "compute", iter(("out", "back"))
        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        log, copy = self.log, Tensor.copy_

        def copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            log.append(f"copy on {self.now}{'' if non_blocking else ', which blocks'}")
            return copy(into, source)

        monkeypatch.setattr(Tensor, "copy_", copied)
        monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: log.append(f"memory is kept for {stream.name}"))

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    def Stream(self, _: object) -> Any:  # noqa: N802
        return self._stream(next(self._names))

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802
        assert blocking  # else a core spins
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"event on {stream.name}"),
            synchronize=lambda: self.log.append("host waits for the event"),
        )

    def current_stream(self, _: object) -> Any:
        return self._stream(self.now)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


def test_each_copy_follows_what_makes_it_and_precedes_what_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host waits for compute, one to the device for nothing."""
    cuda = FakeCuda(monkeypatch)
    side: Any = CudaSide(CPU)
    side.pins = False
    dense, gaps = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).t()[:, ::2]
    hosts, wait = side.to_host([dense, gaps], [TensorSpec.of(dense), TensorSpec.of(gaps)])
    closing = "copy on compute, which blocks"  # on the device: its stream alone
    copying = ["copy on out", "memory is kept for out"] * 2
    assert cuda.log == [closing, "out waits for compute", *copying, "event on out"]
    wait()
    assert cuda.log.pop() == "host waits for the event"
    cuda.log.clear()
    found = side.to_device(hosts)
    assert cuda.log == [*["copy on back", "memory is kept for compute"] * 2, "compute waits for back"]
    for sent, host, came in zip((dense, gaps), hosts, found, strict=True):
        assert torch.equal(sent, host)
        assert torch.equal(sent, came)
        assert host.stride() == came.stride() == TensorSpec.of(sent).stride


class LateSide(HostSide):
    def __init__(self) -> None:
        self.gates: list[threading.Event] = []

    def to_host(self, tensors: Any, specs: Any) -> Any:
        hosts, copied = super().to_host(tensors, specs)
        self.gates.append(gate := threading.Event())
        return hosts, lambda: (gate.wait(60.0), copied())


def late() -> tuple[Any, Any, LateSide]:
    inner, side = mock.create_autospec(ProcessGroupTransport, instance=True, rank=0), LateSide()
    inner.pins = None
    return StagedTransport(inner, side), inner, side


def test_messages_leave_in_order_once_they_are_copied() -> None:
    transport, inner, side = late()
    left: list[tuple[Message, list[float]]] = []
    inner.send.side_effect = lambda message, _, tensors, __: left.append((message, tensors[0].tolist()))
    x = torch.ones(2)
    for index in range(2):
        transport.send(act(index), 1, [x * index], [TensorSpec.of(x)])  # returns at once
    side.gates[1].set()
    transport.post(act(7), 1, [TensorSpec.of(x)])
    inner.post.assert_called_once()
    assert left == []
    side.gates[0].set()
    transport.acknowledged([act(1)])  # by then both have left
    assert left == [(act(0), [0.0, 0.0]), (act(1), [1.0, 1.0])]
    inner.acknowledged.assert_called_once_with([act(1)])
    assert inner.pins is False
    transport.drain(1.0)
    transport.close()
    inner.close.assert_called_once()


def test_nothing_leaves_after_an_abort_and_a_send_that_fails_is_told() -> None:
    transport, inner, side = late()
    inner.send.side_effect = PeerLost("gone", peers=[1])
    transport.send(act(0), 1, [torch.ones(1)], [TensorSpec.of(torch.ones(1))])
    side.gates[0].set()
    with pytest.raises(PeerLost, match="gone"):
        transport.end_of_program()
    transport, inner, side = late()
    for index in range(2):
        transport.send(act(index), 1, [torch.ones(1)], [TensorSpec.of(torch.ones(1))])
    waiting = transport._leaving[act(1)]
    transport.abort()
    assert waiting.cancelled()
    side.gates[0].set()
    transport.close()
    assert [call.args[0] for call in inner.send.call_args_list] in ([], [act(0)])
    inner.abort.assert_called_once()


def backends(
    uuids: str, monkeypatch: pytest.MonkeyPatch, device: torch.device = CUDA, **environment: str
) -> list[tuple[str, list[int], bool]]:
    store = dist.HashStore()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    mine = threading.local()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuids[mine.rank]))

    def choose(rank: int) -> tuple[str, list[int], bool]:
        mine.rank = rank
        groups = Groups(MeshPlace.line(World(rank=rank, size=len(uuids))), device=device, timeout=60.0)
        assert groups.wire.type == ("cuda" if groups.backend == "nccl" else "cpu")
        return groups.backend, groups.sharing, groups.is_staged

    with ThreadPoolExecutor(len(uuids)) as pool:
        return list(pool.map(choose, range(len(uuids))))


def test_nccl_unless_processes_share_a_device_or_the_variable_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends("abc", monkeypatch) == [("nccl", [], False)] * 3
    assert backends("aba", monkeypatch) == [("gloo", [0, 2], True)] * 3
    assert backends("aba", monkeypatch, CPU) == [("gloo", [], False)] * 3
    assert backends("abc", monkeypatch, **{BACKEND: "gloo"}) == [("gloo", [], True)] * 3
    message = r"STAGEWRIGHT_BACKEND=nccl, and the ranks 0, 2 use one device: expected one device per process, .*gloo"
    with pytest.raises(ValueError, match=message):
        backends("aba", monkeypatch, **{BACKEND: "nccl"})
    with pytest.raises(ValueError, match="STAGEWRIGHT_BACKEND=mpi: expected gloo or nccl"):
        backends("ab", monkeypatch, **{BACKEND: "mpi"})
    with pytest.raises(ValueError, match=r"is gloo in process 0, nothing in process 1: expected the same in every"):
        backend_for([DeviceOf("a", "gloo"), DeviceOf("b", "")], str)
    with pytest.raises(ValueError, match=r"process 0 on CUDA, process 1 on the CPU: expected the same kind of device"):
        backend_for([DeviceOf("a", "gloo"), DeviceOf.here(CPU)], str)


def backend_of_a_world() -> str:
    """Of the processes' own group, which torchrun leaves to be made."""
    shared = mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(uuid="a"))
    with shared:
        join_world(device=CUDA, timeout=120.0)
    found: str = dist.get_backend()
    dist.destroy_process_group()
    return found


def test_the_world_is_gloos_where_processes_share_a_device(gloo: Pool) -> None:
    assert gloo.run(backend_of_a_world, ranks=2, group=False) == ["gloo", "gloo"]


def refused(groups: dict[str, Any], mesh: sw.Mesh, tensor: int = 1) -> Callable[[], None]:
    sizes = SimpleNamespace(tensor_sizes=(tensor,), expert=1)
    place = SimpleNamespace(mesh=sizes, world=World(rank=0, size=2))
    run = SimpleNamespace(
        collectives=SimpleNamespace(groups=SimpleNamespace(**groups)),
        layout=SimpleNamespace(place=place),
        options=SimpleNamespace(device=CUDA, mesh=mesh),
    )
    return lambda: PipeContextRun._check_backend(run)


def test_reroute_is_for_gloo_and_tensor_groups_are_for_nccl() -> None:
    over_gloo: dict[str, Any] = {"backend": "gloo", "is_staged": True, "sharing": []}
    over_nccl: dict[str, Any] = {"backend": "nccl", "is_staged": False, "sharing": []}
    reroute = sw.Mesh(on_failure="reroute")
    refused(over_gloo, reroute)()
    refused(over_nccl, sw.Mesh(), 2)()
    with pytest.raises(ValueError, match=r'"reroute"\) with NCCL, .*: expected STAGEWRIGHT_BACKEND=gloo'):
        refused(over_nccl, reroute)()
    with pytest.raises(
        ValueError, match=r"a tensor or expert group on CUDA over gloo, .*: expected Mesh\(tensor=1, expert=1\)"
    ):
        refused(over_gloo, sw.Mesh(), 2)()


def places() -> list[bool]:
    """Whether what a broadcast and an exchange give is on the run's device; the meta one stands for it."""
    collectives = Collectives(MeshPlace.line(World(rank=dist.get_rank(), size=2)), device=CPU, timeout=120.0)
    collectives.device = torch.device("meta")
    with mock.patch.object(Groups, "is_staged", True):
        whole = collectives.broadcast(torch.ones(2), 0, what="a test")
        parts = collectives.exchange([[torch.ones(3)]] * 2, [3, 3], what="a test", ranks=[0, 1])()
    collectives.close()
    return [whole.is_meta, *(part.is_meta for part in parts)]


@pytest.mark.thorough
def test_what_comes_is_on_the_device(gloo: Pool) -> None:
    assert gloo.run(places, ranks=2) == [[True] * 3] * 2


def train(schedule: str, mesh: sw.Mesh, *, is_staged: bool = True) -> tuple[list[float | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())])
    random = torch.Generator().manual_seed(1)
    pipe = sw.PipelineModule(
        model,
        schedule=schedule,
        num_microbatches=4,
        mesh=mesh,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_grad_norm=0.5,
    )
    with staging() if is_staged else nullcontext(), pipe:
        x, y = torch.randn(2, 4, 8, 6, generator=random)
        losses = [pipe.train_step(*batch).loss for batch in zip(x, y, strict=True)]
        pipe.eval_step(x[0], y[0])
        return losses, {name: value.clone() for name, value in pipe.full_state_dict().items()}


@pytest.mark.thorough(but=["1f1b-2"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("interleaved", 2), ("2bw", 3)])
def test_it_trains_as_in_one_process(gloo: Pool, schedule: str, ranks: int) -> None:
    losses, state = train(schedule, sw.Mesh(pipe=ranks), is_staged=False)
    for own, theirs in gloo.run(train, ranks=ranks, args=(schedule, sw.Mesh(pipe=ranks))):
        assert own == losses
        assert all(theirs[name].equal(value) for name, value in state.items())


@pytest.mark.thorough
@pytest.mark.parametrize("data_parallel", ["replicate", "zero1", "fsdp"])
def test_replicas_sum_as_without(gloo: Pool, data_parallel: str) -> None:
    mesh = sw.Mesh(pipe=2, data=2, data_parallel=data_parallel)
    plain = gloo.run(train, ranks=4, args=("1f1b", mesh), kwargs={"is_staged": False})
    for (own, theirs), (losses, state) in zip(gloo.run(train, ranks=4, args=("1f1b", mesh)), plain, strict=True):
        assert own == losses
        assert all(theirs[name].equal(value) for name, value in state.items())
