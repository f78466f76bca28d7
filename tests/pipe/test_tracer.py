"""`pipe.tracer`: which steps are traced, what stands in the files, and what keeps a run from failing over them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import HostClock, RunFile, TraceEvery, building, early_messages, find_traces, is_traced, read_traces
from support.inside import tracer as tracer_file
from support.pool import Pool
from support.small import X, Y, make, stream
from torch.utils.data import Dataset

from stagewright.schedules import Op, Timeline, attribute_idle, simulate, simulate_spread
from stagewright.viz import MeasuredStep

AHEAD = (0.0, 1234.5, 1234.5)  # [s] of the two hosts' clocks, by rank


def read(*folders: Path) -> tuple[MeasuredStep, ...]:
    traces = read_traces(find_traces(folders))
    assert traces.notes == ()
    return traces.steps


def train(pipe: Any, tracer: Any, steps: int) -> None:
    for _ in range(steps):
        pipe.train_step(X, Y)
        tracer.step()


def test_a_traced_step_is_the_timeline_of_its_result(tmp_path: Path) -> None:
    pipe = make()
    results = []
    with pipe.tracer(tmp_path / "run", every=2) as tracer:
        for _ in range(7):
            results.append(pipe.train_step(X, Y))
            assert tracer.step() == (len(results) in (4, 6))
            assert not tracer.step()  # once a step
            pipe.eval_step(X, Y)  # is recorded, too, and no part of it
    steps = read(tmp_path / "run")
    assert [step.number for step in steps] == [3, 5, 6]
    for number, timeline in steps:
        assert timeline.schedule == pipe.schedule
        if number == 6:
            assert {len(rank.compute) for rank in timeline.ranks} == {9}  # four F, four B, an update
    file = RunFile.read(tmp_path / "run")
    assert file.costs is not None
    assert file.simulated == simulate(pipe.schedule, file.costs)
    assert file.schedule == pipe.schedule


def test_ten_steps_tell_how_durations_vary(tmp_path: Path) -> None:
    pipe = make()
    with pipe.tracer(tmp_path / "run") as tracer:
        for number in range(12):
            if number == 2:
                pipe.forget_measurements()
            assert pipe.measured_spread() is None
            pipe.train_step(X, Y)
            pipe.eval_step(X, Y)  # is no step
            tracer.step()
    file, spread = RunFile.read(tmp_path / "run"), pipe.measured_spread()
    assert file.costs is not None
    assert spread is not None
    assert len(spread.steps) == 10
    for step in spread.steps:
        lengths = {op: [len(own) for own in stages] for op, stages in step.items()}
        assert lengths == {Op.F: [4, 4], Op.B: [4, 4], Op.U: [1, 1]}
    assert file.spread == spread
    assert file.sampled == simulate_spread(pipe.schedule, file.costs, spread)
    low, high = file.sampled.range()
    assert low < file.sampled.median < high


@pytest.mark.parametrize("is_stream", [False, True])
def test_waits_for_data_are_a_cause_of_their_own(tmp_path: Path, is_stream: bool) -> None:
    slept = list[float]()

    class Slow(Dataset[tuple[torch.Tensor, ...]]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
            begun = time.perf_counter()
            if number == 0:
                time.sleep(0.05)
            slept.append(time.perf_counter() - begun)
            return X[number], Y[number]

    pipe = stream() if is_stream else make()
    loader = pipe.loader(Slow(), batch_size=len(X), shuffle=False)
    with pipe.tracer(tmp_path, every=1) as tracer:
        for _ in range(4):
            for batch in loader:
                result = pipe.train_step(*batch)
            tracer.step()
        measured = result.timeline()
        pipe.flush()
    waits = sum(slept[-len(X) :])
    for timeline in (measured, read(tmp_path)[-1].timeline):
        for trace, idle in zip(timeline.ranks, attribute_idle(timeline), strict=True):
            assert sum(idle) == pytest.approx(timeline.makespan - trace.busy)
            assert idle.data >= waits - 1e-6
        assert timeline.makespan >= waits
    if not is_stream:
        assert measured.first_action - measured.start >= waits
        assert measured.batch_seconds == pytest.approx(measured.makespan + measured.around)


def test_steps_far_apart_are_few() -> None:
    auto = [step for step in range(100_000) if is_traced(step, "auto")]
    assert auto[:10] == [3, 23, 43, 63, 83, 103, 123, 143, 163, 203]
    assert len(auto) < 100
    assert [step for step in range(20) if is_traced(step, 7)] == [3, 10, 17]
    assert not any(is_traced(step, 0) for step in range(100))


@pytest.mark.parametrize("every", [-1, 1.5, True, "often", None])
def test_distances_that_cannot_be_meant(tmp_path: Path, every: TraceEvery) -> None:
    with pytest.raises(ValueError, match=r"every=.*: expected a number of steps, 0 for the last one only, or 'auto'"):
        make().tracer(tmp_path, every=every)


def test_a_run_that_goes_on_goes_on_in_its_file_and_a_new_one_begins_it_anew(tmp_path: Path) -> None:
    first = make()
    with first.tracer(tmp_path / "run", every=1) as tracer:
        train(first, tracer, 4)
        first.save(tmp_path / "checkpoint")
        train(first, tracer, 2)
    path = tmp_path / "run" / "trace.rank0.jsonl"
    path.write_bytes(path.read_bytes()[:-40])  # the process was killed while it wrote step 5
    second = make()
    second.load(tmp_path / "checkpoint")
    with second.tracer(tmp_path / "run", every=1) as tracer:
        train(second, tracer, 1)
    traces = read_traces([path])
    assert [step.number for step in traces.steps] == [3, 4]
    assert [note.partition(": ")[2] for note in traces.notes] == ["cut off, or no line of a trace; left out"]
    third = make()
    with third.tracer(tmp_path / "run") as tracer:
        train(third, tracer, 1)
    assert [step.number for step in read(tmp_path / "run")] == [0]


def test_a_file_that_is_full_or_cannot_be_written_ends_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = make()
    monkeypatch.setattr(tracer_file, "_MOST_BYTES", 5000)
    with pipe.tracer(tmp_path / "full", every=1) as tracer:
        train(pipe, tracer, 30)
    traces = read_traces(find_traces([tmp_path / "full"]))
    (note,) = traces.notes
    assert note.endswith(f"is full: no step after {traces.steps[-1].number} is traced")
    assert (tmp_path / "full" / "trace.rank0.jsonl").stat().st_size < 5200
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"trace\.rank0\.jsonl: cannot write: .*; nothing more is traced"):
        tracer = pipe.tracer(tmp_path / "file" / "run", every=1)
    pipe.train_step(X, Y)
    assert not tracer.step()


def test_nothing_was_run(tmp_path: Path) -> None:
    pipe = make()
    pipe.tracer(tmp_path).close()
    assert read_traces(find_traces([tmp_path])).steps == ()
    assert not (tmp_path / "timeline.json").exists()


def traced_over_hosts(root: str) -> str:
    """Rank 0 on one host, 1 and 2 on another, each host with a folder of its own: the last step's timeline."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(HostClock, "stamp", lambda self: time.perf_counter() + AHEAD[rank])
        monkeypatch.setattr(building, "machine", lambda: "ab"[AHEAD[rank] > 0])
        with make(mesh={"pipe": 3}) as pipe, pipe.tracer(os.path.join(root, "ab"[AHEAD[rank] > 0]), every=1) as tracer:
            train(pipe, tracer, 4)
            result = pipe.train_step(X, Y)
            tracer.step()
            return result.timeline().to_json()


def test_hosts_with_folders_of_their_own(gloo: Pool, tmp_path: Path) -> None:
    text, *others = gloo.run(traced_over_hosts, ranks=3, args=(str(tmp_path),))
    assert others == [text] * 2
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["trace.rank1.jsonl", "trace.rank2.jsonl"]
    steps = read(tmp_path / "a", tmp_path / "b")
    assert [step.number for step in steps] == [3, 4]
    for timeline in (Timeline.from_json(text), *(step.timeline for step in steps)):
        assert timeline.makespan < 60  # not 1234
        assert timeline.clock_error[0] == 0 < min(timeline.clock_error[1:]) < 30
        assert all(seconds <= allowed for _, seconds, allowed in early_messages(timeline))
    assert read_traces(find_traces([tmp_path / "b"])).steps[0].timeline.missing == (0,)


def spread_of_a_stream() -> tuple[int, int]:
    """How many steps and messages of a stream are known to vary."""
    with stream("2bw") as pipe:
        for _ in range(44):
            pipe.train_step(X, Y)
        spread = pipe.measured_spread()
        assert spread is not None
        return len(spread.steps), len(spread.messages)


def test_messages_of_streams_vary(gloo: Pool) -> None:
    """Eleven windows of four batches, in which each batch has its messages once."""
    steps, messages = gloo.run(spread_of_a_stream, ranks=2)[0]
    assert steps in (43, 44)  # the first may lack an update
    assert messages <= 256  # on a busy machine what goes on around actions may take longer than all of them


def test_headers_tell_the_same_stages_from_others(tmp_path: Path) -> None:
    """The split, and what is recomputed, a policy or not; nothing that differs from start to start."""

    def cut(name: str, **options: Any) -> str:
        with make(**options) as pipe:
            pipe.tracer(tmp_path / name)
        return json.loads((tmp_path / name / "trace.rank0.jsonl").read_text().splitlines()[0])["cut"]

    policies = [{"recompute": {"1": lambda *_: None}} for _ in range(2)]
    options: list[dict[str, Any]] = [{}, {"cut": ["2"]}, {"recompute": "full"}, *policies, {"cut": ["3"]}]
    plain, *others, policy, other_policy, same = (cut(str(at), **each) for at, each in enumerate(options))
    assert len({plain, *others, policy}) == 4
    assert (same, other_policy) == (plain, policy)
