"""The mesh, the environment and the rendezvous: what does not fit is refused with what to type."""

import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import ExchangeError, StoreExchange, _meet, connected, free_ports
from support.pool import Pool, ports_of_this_worker
from support.small import X, Y, make

from stagewright.comm import (
    Collectives,
    FailureBoard,
    Groups,
    Guard,
    MeshPlace,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    World,
    join_world,
    read_mesh,
)

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1)
FOUR = World(rank=2, size=4)


@pytest.mark.parametrize(
    ("mesh", "world", "wanted", "size"),
    [
        (None, ALONE, None, 1),
        ({"pipe": 3}, ALONE, None, 3),
        (None, ALONE, 5, 5),
        (None, FOUR, None, 4),
        ({"pipe": 4, "data": 1, "tensor": 1}, FOUR, 4, 4),
        ({"data": 1}, FOUR, None, 4),
    ],
)
def test_ranks_along_the_pipeline(mesh: Any, world: World, wanted: int | None, size: int) -> None:
    assert read_mesh(mesh, world, wanted=wanted).num_ranks == size


@pytest.mark.parametrize(
    ("mesh", "world", "wanted", "message"),
    [
        ({"pipe": 2}, FOUR, None, r'asks for 2 ranks and .* has 4: expected mesh=\{"pipe": 4\}, or start 2 proc'),
        (None, FOUR, 3, r"the schedule asks for 3 ranks and the process group has 4: expected a schedule of as many,"),
        ({"pipe": 4}, FOUR, 2, r'mesh=\{"pipe": 4\} for a schedule of 2 ranks: expected mesh=\{"pipe": 2\}'),
        ({"pipe": 2, "tensor": 2}, ALONE, None, r'in one process: .* processes. Expected "tensor": 1, or 4 proc'),
        ({"tensor": 3}, FOUR, None, r'mesh=\{"tensor": 3\} on 4 processes: expected a size that divides 4'),
        ({"data": 2, "tensor": 4}, FOUR, None, r'"tensor": 4\} on 4 processes: expected sizes whose product divides 4'),
        ({"pipe": 4, "tensor": 2}, FOUR, None, r'asks for 8 processes .* has 4: expected mesh=\{"pipe": 2, "tensor"'),
        ({"pipe": 4, "data": 2}, FOUR, None, r'asks for 8 ranks .* has 4: expected mesh=\{"pipe": 2, "data": 2\}'),
        ({"pipe": True}, ALONE, None, r"mesh axis 'pipe' has size True: expected a whole number, at least 1"),
        ({"pip": 2}, ALONE, None, r"mesh axis 'pip': expected one of pipe, data, context, expert, tensor"),
    ],
)
def test_a_mesh_that_does_not_fit(mesh: Any, world: World, wanted: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_mesh(mesh, world, wanted=wanted)


@pytest.mark.parametrize("order", ["tensor", ("pipe", "data"), ("pipe", "data", "data"), 3])
def test_an_order_of_axes_that_is_none(order: Any) -> None:
    with pytest.raises(ValueError, match=r"order=.*: expected the axes, each once, the slowest first"):
        read_mesh({"pipe": 4}, FOUR, wanted=None, order=order)


@pytest.mark.parametrize(("size", "named"), [("two", "WORLD_SIZE='two'"), ("2", "RANK=None")])
def test_a_wrong_environment(monkeypatch: pytest.MonkeyPatch, size: str, named: str) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"{named} in the environment: expected a whole number; start with torchrun"):
        join_world(device=CPU, timeout=1.0)


def test_alone_collectives_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    collectives = Collectives(MeshPlace.line(join_world(device=CPU, timeout=1.0)), device=CPU, timeout=1.0)
    tensor = torch.ones(2)
    collectives.all_reduce(tensor, what="a sum")
    assert collectives.broadcast(tensor, 0, what="a copy") is tensor
    assert collectives.gather("mine", what="words") == ["mine"]
    assert torch.equal(tensor, torch.ones(2))
    collectives.abort()


def meet_nobody(ranks: tuple[int, ...], size: int) -> list[str]:
    """What a rendezvous says to each of `ranks` of `size`, one after the other in this process."""
    found = []
    for rank in ranks:
        os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank)}
        with pytest.raises(RuntimeError) as error:
            join_world(device=CPU, timeout=1.0)
        found.append(str(error.value))
    return found


@pytest.mark.gloo
def test_a_rendezvous_that_fails_names_who_is_missing(request: pytest.FixtureRequest) -> None:
    pool = Pool(filters=request.config.getini("filterwarnings"))  # torch counts groups, the failed ones too
    (alone,) = pool.run(meet_nobody, ranks=1, args=((0, 1), 2), group=False)
    pool.close()
    for rank, message in enumerate(alone):
        assert message.startswith(f"rank {rank} of 2 found no rendezvous at 127.0.0.1:")
        assert message.endswith("the same MASTER_ADDR and MASTER_PORT, each with its own RANK")
    assert " within 1 s (missing: rank 1): expected all 2 ranks" in alone[0]
    assert "missing" not in alone[1]  # nobody listens: rank 1 cannot know


TYPES = (torch.float64, torch.bfloat16, torch.bool, torch.int16, torch.uint32, torch.float8_e4m3fn, torch.complex64)


def together() -> list[str]:
    """Every collective once, with all ranks and with two of three; what went wrong."""
    world = World(rank=dist.get_rank(), size=3)
    collectives = Collectives(MeshPlace.line(world), device=CPU, timeout=120.0)
    collectives.subgroup([0, 2])
    complaints = []
    for dtype in TYPES:
        for shape in ((4,), (), (0, 3)):
            expected = torch.full(shape, 1.0).to(dtype)
            mine = expected if world.rank == 1 else torch.empty(shape, dtype=dtype, device="meta")
            found = collectives.broadcast(mine, 1, what="a copy")
            if found.dtype != dtype or not torch.equal(found.to(torch.complex128), expected.to(torch.complex128)):
                complaints.append(f"broadcast of {dtype} {shape}: {found}")
    total = torch.tensor([1.0 + world.rank])
    collectives.all_reduce(total, what="a sum")
    if world.rank != 1:
        collectives.begin_all_reduce(total, what="a sum of two", ranks=(0, 2))()
    if float(total) != (6.0 if world.rank == 1 else 12.0):
        complaints.append(f"all_reduce: {total}")
    if collectives.gather(f"of {world.rank}", what="words") != ["of 0", "of 1", "of 2"]:
        complaints.append("gather")
    return complaints


@pytest.mark.thorough
def test_collectives_of_every_type_over_all_and_over_some(gloo: Pool) -> None:
    assert gloo.run(together, ranks=3) == [[], [], []]


def one_is_missing(how: str) -> tuple[str, str, tuple[int, ...]] | None:
    """Rank 1 makes no call, or lets go."""
    world = World(rank=dist.get_rank(), size=3)
    store = dist.distributed_c10d._get_default_store()
    timeout = 1.0 if how == "silence" else 120.0  # who lets go is known at once, and may come late
    collectives = Collectives(MeshPlace.line(world), device=CPU, timeout=timeout)
    if world.rank == 1:
        if how == "abort":
            collectives.abort()
        store.wait(["told 0", "told 2"], timedelta(seconds=200))
        return None
    with pytest.raises((PipelineTimeout, PeerLost)) as error:
        collectives.gather("mine", what="gathering the timeline")
    collectives.abort()
    store.set(f"told {world.rank}", "")
    return type(error.value).__name__, str(error.value), error.value.peers


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["silence", "abort"])
def test_a_collective_that_a_rank_does_not_join(gloo: Pool, how: str) -> None:
    first, _, third = gloo.run(one_is_missing, ranks=3, args=(how,))
    for rank, (kind, message, peers) in ((0, first), (2, third)):
        assert message.startswith(
            f"rank {rank}: gathering the timeline, together with the ranks 0, 1, 2, failed after "
        )
        assert message.endswith("did all of them make this call?")
        assert peers == tuple({0, 1, 2} - {rank})
        assert kind == "PeerLost" or how == "silence"


def make_and_look() -> bool:
    """Rank 1 takes longer to connect; whether rank 0 is through before that."""
    world = World(rank=dist.get_rank(), size=2)
    store = dist.distributed_c10d._get_default_store()
    groups = Groups(MeshPlace.line(world), device=CPU, timeout=120.0)
    connect = groups._within

    def slowly(*what: Any) -> dist.ProcessGroup:
        made = connect(*what)
        time.sleep(0.3)
        store.set("connected at last", "")
        return made

    if world.rank == 1:
        groups._within = slowly  # type: ignore[method-assign]
    groups.make([0, 1])
    is_early = not store.check(["connected at last"])
    groups.close()
    return is_early


@pytest.mark.thorough
def test_nobody_leaves_while_others_still_connect(gloo: Pool) -> None:
    assert gloo.run(make_and_look, ranks=2) == [False, False]


def not_all_come(where: str) -> tuple[str, str, float]:
    """Rank 2 does not come, or stops in the middle of it."""
    world = World(rank=dist.get_rank(), size=3)
    processes: list[Any] = [None] * 3
    dist.all_gather_object(processes, os.getpid())
    store = dist.distributed_c10d._get_default_store()
    guard = Guard(FailureBoard(store, rank=world.rank, size=3))
    groups = Groups(MeshPlace.line(world), device=CPU, timeout=2.0)

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if world.rank == 2:
        if where == "away":
            threading.Event().wait()
        elif where == "counted":  # it has come, and does not say so
            groups._store = mock.Mock(wraps=groups._store, set=stop)
        elif where == "connecting":
            groups._within = stop  # type: ignore[assignment]
        else:
            groups._within = lambda *what, connect=groups._within: stop(connect(*what))  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(PipelineError) as raised, guard.together():
        groups.make([0, 1, 2])
    seconds = time.monotonic() - started
    if store.add("told", 1) == 2:
        os.kill(processes[2], signal.SIGKILL)
    return type(raised.value).__name__, str(raised.value), seconds


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.parametrize("where", ["away", "counted", "connecting", "connected"])
def test_a_process_that_stops_while_groups_are_made_is_named(request: pytest.FixtureRequest, where: str) -> None:
    """By who waits in vain, and by the other one, which learns of that or has waited as long."""
    pool = Pool(filters=request.config.getini("filterwarnings"))
    replies = pool.replies(not_all_come, ranks=3, args=(where,))
    pool.close()
    kinds = []
    for rank, reply in enumerate(replies[:2]):
        assert reply.kind == "ok", reply.text
        kind, message, seconds = reply.value
        assert message.startswith(f"rank {rank}: making the links of a PipelineModule: the ranks ")
        assert (" 2 have not come" if where in ("away", "connected") else " 2 have not connected") in message
        assert "\ncause: rank 2, which rank " in message
        assert "cause: rank 0" not in message
        assert "cause: rank 1" not in message
        assert (" within 2 s" in message) == (kind == "PipelineTimeout")
        assert kind == "PeerLost" or seconds > 1.7
        kinds.append(kind)
    assert "PipelineTimeout" in kinds
    assert {*kinds} <= {"PipelineTimeout", "PeerLost"}


def unlimited() -> float | None:
    pipe = make(mesh=None, timeout=float("inf"))
    return pipe.train_step(X, Y).loss


@pytest.mark.thorough
def test_a_time_out_may_be_infinite(gloo: Pool) -> None:
    assert None not in gloo.run(unlimited, ranks=2)


@pytest.mark.parametrize(("seconds", "died"), [(0.01, False), (1e6, True)])
def test_connecting_ends_with_its_time_or_with_another_process(seconds: float, died: bool) -> None:
    """gloo alone tries five times, each as long as the time-out."""
    over = threading.Event()
    with pytest.raises(RuntimeError, match="connecting takes too long, or another process has died"):
        connected(over.wait, seconds, someone_died=lambda: died)
    over.set()


@pytest.mark.parametrize(
    "environment", [{"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.2", "LOCAL_WORLD_SIZE": "1"}]
)
def test_the_store_of_one_host_is_reached_from_that_host_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """It has no password: whoever reaches it may write what ranks read."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (port,) = free_ports(1, among=ports_of_this_worker())
    for name, value in {**environment, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    stores = [_meet(ALONE, timedelta(seconds=20), "here")[0] for _ in range(2)]  # a second pipeline shares it
    with socket.create_connection(("127.0.0.1", port), timeout=20):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)  # any other address of this host
    del stores


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize("planted", [pickle.dumps(_Trap()), b"\xff", b"[" * 100_000])
def test_what_stands_in_the_store_is_not_executed(planted: bytes) -> None:
    store = dist.HashStore()
    exchange = StoreExchange(store, rank=0, size=2, name="x", is_over=lambda: False)
    store.set("x/0/1", planted)  # type: ignore[arg-type]  # bytes do as well
    with pytest.raises(ExchangeError, match="asking: an entry of the store is no JSON"):
        exchange.gather("mine", what="asking")


def test_rounds_of_an_exchange_leave_nothing_but_the_last() -> None:
    store, until = dist.HashStore(), time.monotonic() + 60.0

    def rounds(rank: int) -> list[list[list[int]]]:
        exchange = StoreExchange(store, rank=rank, size=2, name="x", is_over=lambda: time.monotonic() > until)
        return [exchange.gather([rank, number], what="asking") for number in range(3)]

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(rounds, range(2))) == [[[[0, n], [1, n]] for n in range(3)]] * 2
    assert store.num_keys() == 2


def test_a_board_with_other_texts_is_no_report_of_other_ranks() -> None:
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, size=3)
    store.set("failure/1/1", '[["x", [], -1, 7, 2], {}, 5, null]')
    told = board.explain(PipelineTimeout("waited", peers=[1]))
    assert "cause: rank 2, which rank 1 waited for, reports nothing" in str(told)
