"""The folder of a run: what is written, and that nothing is ever overwritten.

`read_run`: a run's folder, or those of its hosts, with whatever is left in them.
"""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.inside import (
    ClockReading,
    Manifest,
    MemoryMeter,
    Metrics,
    RankRecord,
    RunFile,
    RunFolder,
    clock_line,
    find_run,
    header_line,
    hosts_of_runs,
    read_exhibits,
    read_run,
    step_line,
    trace_path,
)
from support.run_folder import header_of
from torch import nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import Costs, StageBytes, build, simulate
from stagewright.viz import explorer_html

METRICS = Metrics(
    step=0,
    samples=2,
    tokens=8,
    loss=2.0,
    bits_per_byte=2.9,
    learning_rate=0.1,
    grad_norm=None,
    step_seconds=0.5,
    samples_per_s=4.0,
    tokens_per_s=16.0,
)


def manifest(name: str) -> Manifest:
    return Manifest.of(name=name, config={"steps": 3}, corpus_source="a text", corpus_sha256="ab")


def test_a_run_that_exists_is_never_touched_and_the_error_says_what_to_type(tmp_path: Path) -> None:
    RunFolder.create(manifest("one"), root=tmp_path)
    (tmp_path / "one-2").mkdir()
    with pytest.raises(ValueError, match=r"exists already: .*\(--name one-3\).*\(rm -r .*one\)"):
        RunFolder.create(manifest("one"), root=tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", ".hidden", "a b"])
def test_a_name_stays_inside_the_folder_of_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run name .*: expected letters"):
        RunFolder.check_free(name, root=tmp_path)


def test_a_run_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no runs yet, type `stagewright train`"):
        find_run(Path("one"), root=tmp_path / "runs")
    path = RunFolder.create(manifest("one"), root=tmp_path / "runs").path
    assert find_run(path, root=tmp_path / "runs") == path
    assert find_run(Path("one"), root=tmp_path / "runs") == path
    with pytest.raises(ValueError, match=r"no run folder two: expected .*<name>; there are one"):
        find_run(Path("two"), root=tmp_path / "runs")


def test_peak_memory_counts_what_is_taken_after_the_start() -> None:
    meter = MemoryMeter()
    if meter.at_start == 0:
        pytest.skip("no /proc/self/status here")
    with mmap(-1, 50_000_000) as taken:  # what malloc gives may be of a pipeline before, which keeps what it frees
        taken.write(bytes(len(taken)))
        assert 40e6 < meter.peak() < 400e6
    assert meter.peak() > 40e6  # a peak stays


@contextmanager
def disk_with_room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`; the write that would is cut off there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_steps_that_another_version_wrote_are_kept_and_named(tmp_path: Path) -> None:
    folder = RunFolder.create(manifest("gpt"), root=tmp_path)
    for step in range(3):
        folder.log(replace(METRICS, step=step, simulated_bubble=0.5))
    path = folder.path / "metrics.jsonl"
    old = path.read_text().replace("simulated_bubble", "predicted_bubble")
    path.write_text(old)
    with pytest.raises(ValueError, match=r"line 1: .*'predicted_bubble'.* expected lines of this version"):
        folder.keep_before(3)
    assert path.read_text() == old
    folder.close()


def test_a_full_disk_is_told_and_leaves_no_torn_line_and_no_half_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(manifest("one"), root=tmp_path)
    folder.log(METRICS)
    path = folder.path / "metrics.jsonl"
    line = path.read_text()
    with disk_with_room_for(2 * len(line) + 7):
        folder.log(METRICS)
        with pytest.raises(ValueError, match=r"cannot write .*metrics\.jsonl: .*: expected room on the disk"):
            folder.log(METRICS)
    assert path.read_text() == 2 * line
    folder.log(METRICS)
    assert path.read_text() == 3 * line
    folder = RunFolder.create(manifest("two"), root=tmp_path)
    with disk_with_room_for(20), pytest.raises(ValueError, match=r"cannot write .*plan\.json: "):
        folder.write_plan("x" * 100)
    assert sorted(path.name for path in folder.path.iterdir()) == [".writer", "manifest.json"]  # the lock, and no half


def test_latest_leads_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        RunFolder.create(manifest(name), root=tmp_path)
        assert find_run(Path("latest"), root=tmp_path).resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
    with pytest.raises(ValueError, match="there are one, two"):
        find_run(Path("three"), root=tmp_path)
    with pytest.raises(ValueError, match="is a link to the newest run"):
        RunFolder.check_free("latest", root=tmp_path)


SCHEDULE = build("1f1b", num_ranks=2, num_microbatches=4)
COSTS = Costs(forward=0.5, latency=0.25)


def leave(folder: Path, processes: tuple[int, ...] = (0, 1), *, run: str = "a") -> Path:
    """Files of a run over two hosts in one of its folders."""
    folder.mkdir(parents=True, exist_ok=True)
    timeline = simulate(SCHEDULE, COSTS)
    for process in processes:
        own = {"process": process, "ranks": (process,), "machine": "ab"[process], "host": "node"}
        header = header_of(SCHEDULE, run=run, num_processes=2, **own)
        lines = header_line(header)
        lines += clock_line(run, ClockReading(0.0, 0.0, 0.125)) if process else b""
        for step in (3, 23):
            record = RankRecord(compute=timeline.ranks[process].compute, arrivals=())
            lines += step_line(run, step, {process: record})
        trace_path(folder, process).write_bytes(lines)
    if 0 in processes:
        held = tuple(StageBytes(weights=float(stage + 1)) for stage in range(2))
        RunFile(schedule=SCHEDULE, simulated=timeline, costs=COSTS, memory=held, memory_limit=(9.0, 9.0)).write(folder)
        (folder / "summary.json").write_text(json.dumps({"steps": 24, "peak_tensor_bytes": [3, 4]}))
    return folder


def test_all_that_a_run_left(tmp_path: Path) -> None:
    exhibit = read_run(leave(tmp_path / "gpt"))
    assert exhibit.name == "gpt"
    assert exhibit.notes == ("step 23: clocks of hosts aligned to ±125 ms",)
    assert exhibit.timelines[-1][0] == "measured, step 23, clocks ±125 ms"
    assert exhibit.simulated == simulate(SCHEDULE, COSTS)
    assert [step.number for step in exhibit.measured] == [3, 23]
    assert (exhibit.costs, exhibit.memory[1].weights) == (COSTS, 2.0)
    assert (exhibit.memory_limit, exhibit.measured_peak) == ((9.0, 9.0), (3.0, 4.0))
    assert exhibit.measured[0].timeline.clock_error == pytest.approx((0.0, 0.125), abs=1e-3)


def test_hosts_with_a_folder_each(tmp_path: Path) -> None:
    a, b = leave(tmp_path / "a" / "gpt", (0,)), leave(tmp_path / "b" / "gpt", (1,))
    other = leave(tmp_path / "other", run="b")
    for folders in ((a, b), (b, a)):
        exhibit = read_run(*folders)
        assert (len(exhibit.notes), exhibit.measured[-1].timeline.missing) == (1, ())  # of clocks alone
    assert read_run(b).measured[-1].timeline.missing == (0,)
    assert "no simulation" in read_run(b).notes[0]
    assert hosts_of_runs([a, other, b]) == [(other,), (a, b)]
    with pytest.raises(ValueError, match=r"other is of another run than .*gpt: expected folders that hosts have left"):
        read_run(a, other)
    sources = [str(b), str(other), str(a)]
    assert [(each.name, len(each.notes)) for each in read_exhibits(sources)] == [("gpt", 1), ("other", 1)]
    whole = leave(tmp_path / "whole")
    files = [str(whole / f"trace.rank{rank}.jsonl") for rank in range(2)]
    assert read_exhibits(files) == [read_run(whole)]
    shutil.copytree(a, tmp_path / "copy")
    assert hosts_of_runs([a, tmp_path / "copy"]) == [(a,), (tmp_path / "copy",)]  # nothing of another host


def test_a_simulation_of_another_shape_is_drawn_beside_the_run(tmp_path: Path) -> None:
    folder = leave(tmp_path / "gpt")
    other = simulate(build("1f1b", num_ranks=3, num_microbatches=4), COSTS)
    held = (StageBytes(weights=1.0),) * 3
    RunFile(schedule=other.schedule, simulated=other, costs=COSTS, memory=held, memory_limit=(9.0,) * 3).write(folder)
    exhibit = read_run(folder)
    curves = exhibit.curves(other)
    assert len(curves) == 3
    assert exhibit.curves(exhibit.measured[0].timeline) is None  # whose stages' bytes nobody knows
    assert "gpt" in explorer_html([exhibit])


def test_a_run_that_was_ended_before_it_simulated(tmp_path: Path) -> None:
    folder = leave(tmp_path / "gpt")
    (folder / "timeline.json").unlink()
    exhibit = read_run(folder)
    assert (exhibit.simulated, exhibit.costs, len(exhibit.measured)) == (None, None, 2)
    assert exhibit.notes[:-1] == (f"no simulation: {folder} has no timeline.json, which process 0 of a run writes",)
    for rank in range(2):
        (folder / f"trace.rank{rank}.jsonl").write_bytes(b'{"step": 3')
    with pytest.raises(
        ValueError, match=r"nothing to show in .*trace.rank0.jsonl, line 1: cut off, or no line of a tr"
    ):
        read_run(folder)
    leave(folder)
    for rank in range(2):
        (folder / f"trace.rank{rank}.jsonl").unlink()
    exhibit = read_run(folder)
    assert exhibit.notes == (f"no step was traced: {folder} has no trace.rankN.jsonl",)
    assert exhibit.simulated is not None


@pytest.mark.thorough(but=["2"])
@pytest.mark.parametrize("seed", range(3))
def test_broken_files_are_values_that_name_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder = leave(tmp_path / "gpt")
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(40):
        for path, data in whole.items():
            broken = bytearray(data)
            if draw.random() < 0.5:
                at = draw.randrange(len(broken))
                broken[at : at + draw.randint(0, 4)] = draw.randbytes(draw.randint(0, 4))
            elif draw.random() < 0.3:
                del broken[draw.randrange(len(broken)) :]
            path.write_bytes(broken)
        told = ""
        try:
            read_run(folder)
        except ValueError as error:
            told = str(error)
        assert not told or str(folder) in told


def test_a_users_own_loop_leaves_what_is_read(tmp_path: Path) -> None:
    """The few lines of docs/tools/timeline.md."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = PipelineModule(
        model,
        mesh={"pipe": 2},
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs=(torch.zeros(4, 4),),
    )
    with pipe.tracer(tmp_path / "mine") as tracer:
        for _ in range(6):
            pipe.train_step(torch.ones(4, 4), torch.zeros(4, 4))
            tracer.step()
    exhibit = read_run(tmp_path / "mine")
    assert [step.number for step in exhibit.measured] == [3, 5]
    assert exhibit.costs is not None
    assert exhibit.notes == ()
