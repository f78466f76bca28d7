"""Checkpoints beside training: what is saved is the state behind one step, whatever the next ones do meanwhile."""

import errno
import gc
import itertools
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing import refusal
from support.inside import FIRST, Checkpointer, CheckpointRecord, Cost, HostCopy, Interval, _StepClock
from support.inside import checkpoint_persist as persist
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.small import X, Y, layers
from support.small import make as make_small
from torch import nn
from torch.utils.data import TensorDataset

from stagewright.comm import PipelineTimeout
from stagewright.pipe import PipelineModule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def make(schedule: str = "1f1b", *, device: str = "cpu", mesh: dict[str, int] | None = None) -> PipelineModule:
    torch.manual_seed(3)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 2)).double().to(device)
    x = torch.zeros(16, 6, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "example_inputs": (x,)}
    options["lr_scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    return make_small(model=model, schedule=schedule, mesh=mesh or {"pipe": 2}, timeout=120.0, **options)


def data(device: str = "cpu") -> TensorDataset:
    return TensorDataset(*(each.to(device) for each in batch(0, samples=96, out=2)))


@pytest.mark.thorough(but=["interleaved-None-cuda", "1f1b-mesh3-cpu"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("schedule", "mesh"), [("1f1b", None), ("interleaved", None), ("2bw", None), ("1f1b", {"pipe": 1, "data": 2})]
)
def test_what_is_saved_is_the_state_behind_its_step(
    schedule: str, mesh: dict[str, int] | None, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are made as late as they may be: just in time for the update behind the next backwards."""
    finish = HostCopy.finish

    def late(copies: HostCopy) -> None:
        time.sleep(0.05)  # forwards and backwards of the next step have run by then
        finish(copies)

    monkeypatch.setattr(HostCopy, "finish", late)
    pipe, found = make(schedule, device=device, mesh=mesh), list[CheckpointRecord]()
    loader = pipe.loader(data(device), batch_size=16)
    losses: list[float | None] = []
    with pipe.checkpointer(tmp_path, every=3, loader=loader, on_saved=found.append) as saver:
        for batch in itertools.chain(loader, loader):
            losses.append(pipe.train_step(*batch).loss)
            pipe.flush()
            saver.step()
            if len(losses) == 8:
                break
    assert [record.step for record in found] == [3, 6]
    for record in found:
        again = make(schedule, device=device, mesh=mesh)
        place = again.loader(data(device), batch_size=16)
        again.load(record.path, loader=place)
        assert again.num_steps == record.step
        new = []
        for batch in itertools.islice(itertools.chain(place, place), len(losses) - record.step):
            new.append(again.train_step(*batch).loss)
            again.flush()
        assert new == losses[record.step :]
        assert len(new) > 0


class Renormed(Parts, table=lambda: nn.Embedding(5, 6, max_norm=0.5), head=lambda: nn.Linear(6, 2)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table(x)
        CHANGED.set()
        return self.head(found)  # type: ignore[no-any-return]


CHANGED = threading.Event()


def test_a_weight_that_a_forward_changes_is_found_and_then_copied_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies beside the step are made behind the change."""
    torch.manual_seed(0)
    x, y = torch.randint(5, (8,)), torch.randn(8, 2)
    pipe = make_small(model=nn.Sequential(Renormed(), nn.Linear(2, 2)), example_inputs=(x,))
    finish = HostCopy.finish
    monkeypatch.setattr(HostCopy, "finish", lambda copy: CHANGED.wait() and finish(copy))
    with pipe.checkpointer(tmp_path, every=1) as saver:
        pipe.train_step(x, y)
        for found in (True, False):
            with torch.no_grad():
                dict(pipe.named_parameters())["0.table.weight"] *= 3
            CHANGED.clear()
            saver.step()
            before = {name: value.clone() for name, value in pipe.state_dict().items()}
            pipe.train_step(x, y)
            with pytest.warns(UserWarning, match=r"of shape \(5, 6\) was changed while") if found else nullcontext():
                saver.wait()
            assert (saver.records[-1].path is None) is found
    pipe.load(saver.records[-1].path)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def step_behind_the_thread(saver: Checkpointer) -> None:
    saver._under_way.thread.join()
    saver.step()


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("ends", [Checkpointer.wait, step_behind_the_thread])
def test_a_full_disk_is_told_and_the_next_interval_tries_again(
    ends: Callable[[Checkpointer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, whole = make_small(model=layers()), persist.write_file
    room = True

    def write(*args: Any, **options: Any) -> Any:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return whole(*args, **options)

    monkeypatch.setattr(persist, "write_file", write)
    with pipe.checkpointer(tmp_path, every=2) as saver:
        for step in range(1, 7):
            room = step not in (4, 5)
            pipe.train_step(X, Y)
            saver.step()
            if step == 2:
                saver.wait()  # whole before the disk is full, however quick the steps are
            if step == 4:
                with pytest.warns(UserWarning, match=r"No space left on device.*the next interval tries again") as told:
                    ends(saver)
                assert told[0].filename == __file__
                assert (tmp_path / "latest").read_text().startswith("step-2-")
                assert len(list(tmp_path.glob("step-*"))) == 1
    assert [(one.step, one.path is not None) for one in saver.records] == [(2, True), (4, False), (6, True)]
    assert (tmp_path / "latest").read_text().startswith("step-6-")
    assert saver.overhead is None or saver.overhead >= 0


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A persist that takes three steps: the next one begins when it is done."""
    under_way, most = 0, 0
    whole = persist.write_file

    def write(*args: Any, **options: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.02)
        under_way -= 1
        return whole(*args, **options)

    monkeypatch.setattr(persist, "write_file", write)
    pipe = make_small()
    with pipe.checkpointer(tmp_path, every=1) as saver:
        for _ in range(5):
            pipe.train_step(X, Y)
            saver.step()
    assert (most, len(saver.records)) == (1, 5)
    assert not [thread for thread in threading.enumerate() if thread.name == "stagewright-checkpoint"]


def test_a_folder_has_one_checkpointer_until_it_is_closed_or_forgotten(tmp_path: Path) -> None:
    """A second one was taken, and both wrote."""
    pipe = make_small()
    saver = pipe.checkpointer(tmp_path, every=1)
    with pytest.raises(ValueError, match=r"has a checkpointer: expected its close\(\) first, or another folder"):
        make_small().checkpointer(tmp_path, every=1)
    saver.close()
    other = pipe.checkpointer(tmp_path, every=1)
    del other
    gc.collect()
    pipe.checkpointer(tmp_path, every=1).close()


def test_a_disk_that_never_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(persist, "write_file", lambda *args, **options: answered.wait())
    saver = make_small(timeout=0.2).checkpointer(tmp_path, every=1)
    with pytest.raises(PipelineTimeout, match=r"after step 0 is not written after 0.2 s: rank 0 has not written its"):
        saver.save()
    with pytest.raises(AssertionError), saver:  # an error in the block does not wait
        raise AssertionError
    answered.set()


def test_the_interval_keeps_to_the_share_and_follows_what_changes() -> None:
    interval = Interval(0.035)
    assert interval.every == FIRST
    for step_seconds, seconds in [(0.1, 0.2)] * 6 + [(0.1, 0.8)] * 6 + [(0.4, 0.2)] * 6:
        every = interval.learn([Cost(seconds, 2, step_seconds), Cost(seconds / 2, 3, step_seconds)])
        last = seconds / (every * step_seconds)
    assert every == 15  # 0.2 / (0.035 * 0.4)
    assert 0.03 < last <= 0.035
    assert interval.learn([Cost(1e9, 2, 0.4)]) == 15  # one slow save
    assert interval.learn([Cost(1e9, 2, 0.4)]) == 60  # and again: four times as many at most
    cheap = Interval(0.5)
    assert [cheap.learn([Cost(1e-6, 4, 1.0)]) for _ in range(2)] == [6, 6]  # the cost of one must be told from the next


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: expected a number of steps, at least 1, or 'auto'"),
        ({"every": "often"}, "every='often': expected"),
        ({"every": "auto", "overhead": 3.5}, "overhead=3.5: expected a share of the time above 0 and below 1"),
    ],
)
def test_intervals_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_small().checkpointer(tmp_path, **options)


def test_a_checkpoint_costs_what_steps_beside_it_take_longer_and_its_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock, costs = 0.0, _StepClock(), list[Cost]()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    # seconds of a step, of the stall behind it, and whether a checkpoint is under way beside the next one
    for step, (seconds, stall, is_busy) in enumerate([(9, 0, 0), (9, 0, 0), (2, 0, 0), (2, 1, 1), (2.5, 0, 0)] * 2):
        now += seconds
        clock.entered(step)
        now += stall
        clock.left(is_busy=bool(is_busy))
        if step % 5 == 4:
            costs.append(clock.cost())
    assert costs[0] == Cost(1.5, 1, 2.0)
    assert costs[1].seconds == pytest.approx(1.0 + 2.5 - costs[1].step_seconds)  # the first one's is forgotten


def test_memory_of_a_copy_is_used_again_for_its_like_alone() -> None:
    copies = HostCopy(torch.device("cpu"))
    one, other = torch.arange(2**20 + 5), torch.full((2**20 + 5,), 0.5)  # more than a piece
    memory = []
    for tensors in ((one, other), (one, other), (other, one)):
        copies.begin(tensors)
        memory.append([copies.copy(tensor) for tensor in tensors])
        copies.start()
        copies.finish()
        assert [(host.dtype, torch.equal(host, x)) for host, x in zip(memory[-1], tensors, strict=True)] == [
            (x.dtype, True) for x in tensors
        ]
    assert [host.data_ptr() for host in memory[0]] == [host.data_ptr() for host in memory[1]]


def test_automatic_intervals_are_found(tmp_path: Path) -> None:
    pipe = make_small()
    with pipe.checkpointer(tmp_path, every="auto", overhead=0.5) as saver:
        while len(saver.records) < 2:  # sooner or later, as quick as the disk is
            pipe.train_step(X, Y)
            saver.step()
    steps = [one.step for one in saver.records]
    assert steps[0] == FIRST
    assert steps[1] > FIRST
    assert saver.overhead >= 0


def save_beside_training(folder: str) -> tuple[list[tuple[int, bool, str]], int, list[float | None], str]:
    """Rank 1's disk is slow, and full once; rank 0 fails once. Records, steps beside a persist, losses, a refusal."""
    import torch.distributed as dist

    rank, whole, written, losses = dist.get_rank(), persist.write_file, 0, list[float | None]()

    def write(*args: Any, **options: Any) -> Any:
        nonlocal written
        written += 1
        saved_at = 3 * written  # however late this thread begins: training waits for it before it saves again
        while rank == 1 and len(losses) < min(saved_at + 3, 12):  # until the last step before it saves again
            time.sleep(0.005)
        if rank == 1 and written == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        if rank == 0 and written == 3:
            raise RuntimeError("odd")
        return whole(*args, **options)

    persist.write_file = write
    try:
        pipe, beside = make(), 0
        loader = pipe.loader(data(), batch_size=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pipe.checkpointer(folder, every=3, loader=loader) as saver:
                for batch in itertools.chain(loader, loader):
                    losses.append(pipe.train_step(*batch).loss)
                    beside += any(one.name == "stagewright-checkpoint" for one in threading.enumerate())
                    saver.step()
        told = refusal(lambda: pipe.checkpointer(folder, every=2 + rank))
        return [(one.step, one.path is not None, one.problem) for one in saver.records], beside, losses, told
    finally:
        persist.write_file = whole
        pipe.close()


def test_processes_agree_beside_training(gloo: Pool, tmp_path: Path) -> None:
    """No step waits for rank 1's disk; where one fails nobody has a checkpoint, and the next one is whole."""
    folder = tmp_path / "c"
    one, other = gloo.run(save_beside_training, ranks=2, args=(str(folder),))
    for records, beside, _, told in (one, other):
        assert [(step, is_there) for step, is_there, _ in records] == [(3, True), (6, False), (9, False), (12, True)]
        assert "rank 1: " in records[1][2]
        assert "No space left on device" in records[1][2]
        assert "RuntimeError: odd" in records[2][2]
        assert beside >= 6  # two steps beside each of three
        assert "rank 0 saves every=2 with overhead=0.035, and rank 1 every=3" in told
    assert one[2] == other[2]
    again = make()
    place = again.loader(data(), batch_size=16)
    again.load(next(path for path in folder.glob("step-3-*")), loader=place)
    assert [again.train_step(*batch).loss for batch in place] == one[2][3:6]
    assert len(list(folder.glob("step-*"))) == 2
