"""When things go wrong between real processes: every rank stops in time, and knows whose fault it was.

    an error before anything is sent    the same on every rank, and the pipe goes on
    an error on one rank                its own there, PeerLost with that cause on the others, at once; the same
                                        ValueError where it is a refusal of this package's
    a rank that dies or stalls          PeerLost or PipelineTimeout that names it, within the time-out

Every function here that takes no fixture runs in a worker. `SHORT` is a time-out that must run out, `LONG` one that
must not. "At once" is less than half of LONG.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.failing import LONG, Told, pipeline, raise_key_error, step, told
from support.inside import Engine
from support.parts import Parts
from support.pool import Pool
from support.small import X, Y, layers, make, sgd
from torch import Tensor, nn

from stagewright.comm import Collectives

pytestmark = pytest.mark.gloo

SHORT = 4.0  # [s]


def at_once(*found: Told) -> bool:
    """Whether all of it came before a time-out could have been waited for."""
    return max(one.seconds for one in found) < LONG / 2


class Undecided(Parts, layers=lambda: layers(2)):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 0 else x


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mesh": {"pipe": 3}}, 'asks for 3 ranks and the process group has 2: expected mesh={"pipe": 2}, or start 3 proc'),
    ({"mesh": {"pipe": 2, "data": 2}}, 'and the process group has 2: expected mesh={"pipe": 1, "data": 2}, or start 4'),
    ({"schedule": "1f2b"}, "unknown schedule '1f2b': expected one of gpipe, 1f1b"),
    ({"model": layers(1)}, "num_stages=2 for a model of 1 units that can be cut apart: expected 1 to 1; take fewer"),
    ({"cut": ["4x"]}, "cut='4x' is no child of the nn.Sequential: expected the name of one that begins a stage"),
    ({"schedule": "plan.csv", "num_microbatches": None}, "plan.csv: deadlock: a cycle of 2 ranks, each waiting for"),
    ({"model": Undecided()}, "test_failures_gloo.py"),
    ({"optimizer": lambda parameters: None}, "optimizer= returned NoneType: expected a callable"),
]


def wrong_from_the_start(folder: str) -> list[Told]:
    os.chdir(folder)
    found = [told(lambda options=options: make(**({"mesh": None} | options))) for options, _ in WRONG]
    pipe = pipeline()
    pipe.train_step(X, Y)  # the process group is as good as new
    pipe.close()
    return found


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_on_every_rank_alike(gloo: Pool, tmp_path: Any) -> None:
    (tmp_path / "plan.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    first, second = gloo.run(wrong_from_the_start, ranks=2, args=(str(tmp_path),))
    assert [(one.kind, one.text) for one in first] == [(one.kind, one.text) for one in second]
    assert [one.kind for one in first] == ["ValueError"] * 5 + ["ScheduleError"] + ["ValueError"] * 2
    for one, (_, text) in zip(first, WRONG, strict=True):
        assert text in one.text
    assert at_once(*first, *second)


def error_on_one_rank() -> tuple[list[Told], float]:
    """In a stage, in the loss, in the optimizer, in its factory: each time a new pipeline in the same processes."""
    rank = int(os.environ["RANK"])
    pipe = pipeline(trip={1: raise_key_error})
    found = [told(step(pipe)), told(step(pipe)), told(pipe.full_state_dict), told(pipe.close)]
    pipe = pipeline(loss_fn=lambda output, target: (output - target) ** 2)
    found += [told(step(pipe)), told(pipe.close)]
    pipe = pipeline()
    if rank == 1:
        pipe.optimizers[0].step = raise_key_error  # type: ignore[method-assign]
    found += [told(lambda: (step(pipe)(), step(pipe)())), told(pipe.close)]

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if rank == 1:
            raise_key_error()
        return sgd(parameters)

    def make_and_step() -> Any:
        return step(pipeline(optimizer=factory))()

    found.append(told(make_and_step))
    return found, step(pipeline())()


@pytest.mark.thorough
def test_an_error_on_one_rank_is_the_cause_on_the_others_at_once(gloo: Pool) -> None:
    results = gloo.run(error_on_one_rank, ranks=3)
    assert len({loss for _, loss in results}) == 1  # the processes still work together
    for rank, (found, _) in enumerate(results):
        in_stage, again, collective, closed, in_loss, closed_too, in_optimizer, closed_three, in_factory = found
        for one, culprit, story in [
            (in_stage, 1, 'KeyError: "the user\'s own trouble"'),
            (in_loss, 2, "ValueError: loss_fn returned a tensor of shape (2, 6): expected a scalar tensor"),
            (in_optimizer, 1, 'KeyError: "the user\'s own trouble"'),
            (in_factory, 1, 'KeyError: "the user\'s own trouble"'),
        ]:
            kind, text = story.split(": ", 1)
            if rank == culprit:
                assert one.kind == kind
                assert one.text.startswith(text)
            elif kind == "ValueError":
                assert one.kind == kind
                assert one.text.startswith(text)
                assert f"\n(found on rank {culprit}; rank {rank}: lost the connection to rank " in one.text
            else:
                assert one.kind == "PeerLost"
                waits = "comparing the first batch, together" if one is in_factory else "lost the connection to rank "
                assert one.text.startswith(f"rank {rank}: {waits}")
                assert f"\ncause: rank {culprit} failed: {story}" in one.text
            assert at_once(one)
        assert rank == 1 or f"; last actions of rank {rank}: {rank}F" in in_stage.text
        for one in (again, collective):
            assert one.kind == "PipelineError"
            assert one.text.startswith("this pipeline has ended: expected a new PipelineModule after ")
        assert [one.kind for one in (closed, closed_too, closed_three)] == ["none"] * 3
        assert at_once(again, closed, closed_too, closed_three)


@pytest.fixture
def fragile(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Workers of one test: those of the session would all have to start again."""
    pool = Pool(filters=request.config.getini("filterwarnings"))
    yield pool
    pool.close()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_a_worker() -> None:
    """A forked one, as a DataLoader's, which is busy and lives on: it has no part in the connections."""
    if os.fork():
        die()
    for number in range(3, 1000):
        with suppress(OSError):
            one = socket.socket(fileno=number)
            one.close() if one.family == socket.AF_UNIX else one.detach()  # the pool's own
    time.sleep(4 * SHORT)
    os._exit(0)


def stall() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def waits_of(seconds: float) -> Iterator[None]:
    """A time-out within a batch alone: to build, a busy machine may need longer than one that must run out."""
    make = Engine.__init__

    def made(self: Engine, *given: Any) -> None:
        make(self, *given)
        self._timeout = seconds

    with mock.patch.object(Engine, "__init__", made):
        yield


def lose_a_rank(how: str, victim: int, timeout: float) -> tuple[Told, Told]:
    """Rank `victim` dies or stalls in the middle of a batch; the others say what they were told, and put it away."""
    warm = pipeline()  # the first one imports a good part of torch
    step(warm)()
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    with waits_of(timeout):
        pipe = pipeline(trip={victim: die if how == "dies" else stall})
        found = told(step(pipe)), told(pipe.close)
    store = dist.distributed_c10d._get_default_store()
    others = dist.get_world_size() - 1
    if how == "stalls" and (victim == 0 or store.add("told", 1) == others):
        os.kill(processes[victim], signal.SIGKILL)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_dies_or_stalls_is_named_with_who_waits_for_what(fragile: Pool, how: str) -> None:
    timeout = LONG if how == "dies" else SHORT
    first, second, third = fragile.replies(lose_a_rank, ranks=3, args=(how, 2, timeout))
    assert how == "stalls" or third.kind == "died"
    for rank, reply in enumerate((first, second)):
        assert reply.kind == "ok", reply.text
        lost, closed = reply.value
        if lost.kind == "PeerLost":
            assert how == "dies" or rank == 0
            assert lost.text.startswith(f"rank {rank}: lost the connection to rank {rank + 1} after waiting ")
        else:
            assert (how, lost.kind) == ("stalls", "PipelineTimeout")
            assert lost.seconds > SHORT - 0.1
        assert f" for {rank + 1}B" in lost.text
        assert f" of rank {rank + 1}, which makes the gradients of microbatch" in lost.text
        assert f", needed before {rank}B" in lost.text
        assert f"; last actions of rank {rank}: " in lost.text
        why = "it died" if how == "dies" else "it is stalled, or still busy"
        assert f"\ncause: rank 2, which rank 1 waited for, reports nothing: {why}" in lost.text
        assert closed.kind == "none"
        assert at_once(lost, closed)


def lose_a_replica(how: str, timeout: float) -> tuple[Told, Told]:
    """Replica 1 dies or stalls in its last backward; replica 0 computes longer than a time-out in its own."""
    rank = dist.get_rank()
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    store, here = dist.distributed_c10d._get_default_store(), [f"last backward of {process}" for process in processes]
    torch.manual_seed(0)
    model = layers(2)
    trips = [partial(time.sleep, 1.5 * timeout), die_beside_a_worker if how == "dies" else stall]
    backwards: list[None] = []
    made, make_collectives = list[Collectives](), Collectives.__init__

    def noted(self: Collectives, *given: Any, **options: Any) -> None:
        make_collectives(self, *given, **options)
        made.append(self)

    def behind_a_backward(*_: object) -> None:
        backwards.append(None)
        if len(backwards) == 4:
            for each in made:  # from here on: to build, a busy machine may need longer
                each._timeout = each.groups._timeout = timeout
            # Both have computed their losses, which are exchanged meanwhile: they are there before this rank goes.
            store.set(here[rank], "")
            store.wait(here)
            time.sleep(0.5)
            trips[rank]()

    model[1].register_full_backward_hook(behind_a_backward)
    with mock.patch.object(Collectives, "__init__", noted):
        pipe = make(model=model, mesh={"pipe": 1, "data": 2}, timeout=LONG)
        found = told(step(pipe)), told(pipe.close)
    if how == "stalls":
        os.kill(processes[1], signal.SIGKILL)
    return found


@pytest.mark.thorough(but=["dies"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_replica_that_is_lost_before_its_sums_is_named(fragile: Pool, how: str) -> None:
    first, _ = fragile.replies(lose_a_replica, ranks=2, args=(how, SHORT))
    assert first.kind == "ok", first.text
    lost, closed = first.value
    assert lost.kind == ("PeerLost" if how == "dies" else "PipelineTimeout")
    assert "0: summing shared gradients (replicas, tied weights) of stage 0, together with " in lost.text
    assert ", at the end of the batch; last actions of rank 0: " in lost.text
    assert f"reports nothing: it {'died' if how == 'dies' else 'is stalled, or still busy'}" in lost.text
    if how == "stalls":  # a wait is what runs out, not the seconds in which this rank computed
        assert lost.seconds > 2.5 * SHORT - 0.1
    assert closed.kind == "none"
    assert at_once(lost, closed)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_rank_that_hosts_the_store_goes(fragile: Pool, how: str) -> None:
    """Without a launcher rank 0 hosts the rendezvous, and the reports go with it."""
    _, second = fragile.replies(lose_a_rank, ranks=2, args=(how, 0, SHORT), group=False)
    assert second.kind == "ok", second.text
    lost, closed = second.value
    assert lost.kind == ("PeerLost" if how == "dies" else "PipelineTimeout")
    assert " of rank 0, which makes the activations of microbatch" in lost.text
    assert "\ncause: the rendezvous store does not answer either: its host (rank 0, unless a" in lost.text
    assert closed.kind == "none"
    assert at_once(lost, closed)


def few_files() -> Told:
    """Rank 0 may not open what the links take."""
    taken, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 12, hard))
    found = told(lambda: make(mesh=None, timeout=SHORT))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return found


def test_too_many_open_files_are_no_fault_of_the_network(fragile: Pool) -> None:
    first, second = (reply.value for reply in fragile.replies(few_files, ranks=2))
    assert first.text.startswith("rank 0: making the links: ")
    assert " files are open: expected ulimit -n " in first.text
    assert second.text.endswith(f"\ncause: rank 0 failed: {first.text}")


def cut() -> None:
    """Shut down every connection of this process between ranks, as a network does that goes away."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    ours = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if ours and store.port not in (connection.getpeername()[1], connection.getsockname()[1]):
                        connection.shutdown(socket.SHUT_RDWR)


def lose_a_link() -> tuple[Told, Told]:
    warm = pipeline()
    step(warm)()
    pipe = pipeline(timeout=LONG, trip={1: cut})
    return told(step(pipe)), told(pipe.close)


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc/self here")
def test_a_link_that_is_cut_between_live_ranks_is_no_mistake_of_the_user(fragile: Pool) -> None:
    for reply in fragile.replies(lose_a_link, ranks=2):
        assert reply.kind == "ok", reply.text
        lost, closed = reply.value
        assert lost.kind == "PeerLost"
        assert "\ncause: the connection between the ranks 0-1 broke while both ends were alive" in lost.text
        assert "same calls" not in lost.text
        assert at_once(lost)
        assert closed.kind == "none"


def fail_between_the_calls(who: int, after: int) -> Told:
    """As where a DataLoader's worker dies, behind so many batches; before the first the others wait for the links."""
    pipe = make(mesh=None, timeout=LONG, example_inputs=None)

    def run() -> None:
        with pipe:
            for number in range(3):
                if (pipe.rank, number) == (who, after):
                    raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")
                pipe.train_step(X, Y)

    return told(run)


@pytest.mark.thorough(but=["0-0"])
@pytest.mark.parametrize(("who", "after"), [(0, 0), (1, 0), (1, 1)])
def test_a_loader_that_dies_between_the_calls_is_named_at_once(gloo: Pool, who: int, after: int) -> None:
    found = gloo.run(fail_between_the_calls, ranks=2, args=(who, after))
    assert found[who].kind == "RuntimeError"
    assert found[1 - who].kind == "PeerLost"
    assert f"cause: rank {who} failed: RuntimeError: DataLoader worker (pid 1) exited" in found[1 - who].text
    assert at_once(*found)
