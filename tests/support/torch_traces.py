"""Traces of torch.profiler around torch.distributed.pipelining's own schedules, a file a rank.

`python tests/support/torch_traces.py` makes tests/data/kineto anew: two gloo processes on this machine's CPU.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B, schedules
from torch.profiler import ProfilerActivity, profile, record_function

MICROBATCHES, WIDTH = 4, 512
CHUNKS = {"gpipe": 1, "interleaved": 2, "zb-v": 2, "1f1b": 1, "1f1b-named": 1}
_KEPT = ("user_annotation", "cpu_op")
_CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "1f1b-named": schedules.Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}


def name_actions(stage: PipelineStage) -> None:
    """Give names to the actions of schedules that give none, as docs/tools/timeline.md has it."""
    for method, op in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        run = getattr(stage, method)

        def named(index: int, *args: Any, run: Any = run, op: str = op, **options: Any) -> Any:
            with record_function(f"PP:{stage.stage_index}{op}{index}"):
                return run(index, *args, **options)

        setattr(stage, method, named)


def trace_own(name: str, folder: str) -> None:
    """Run two batches of a schedule in the default process group, and trace the second to a file of this rank's."""
    rank, world, chunks = dist.get_rank(), dist.get_world_size(), CHUNKS[name]
    torch.manual_seed(rank)
    own = (rank, 2 * world - 1 - rank) if name == "zb-v" else tuple(rank + c * world for c in range(chunks))
    stages = [
        PipelineStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), s, chunks * world, torch.device("cpu"))
        for s in own
    ]
    if name == "1f1b-named":
        name_actions(stages[0])
    loss_fn = nn.MSELoss()
    schedule = _CLASSES[name](stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=loss_fn)
    torch.set_num_threads(1)
    x = torch.randn(256 * MICROBATCHES, WIDTH)

    def step() -> None:
        has_last = chunks * world - 1 in own
        schedule.step(*([x] if 0 in own else []), **({"target": x} if has_last else {}))

    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        step()
    profiler.export_chrome_trace(f"{folder}/{name}.rank{rank}.json")


def slim(path: Path, to: Path) -> None:
    """The same trace without what a fixture has no use for: other categories, shapes, links to other events."""
    data = json.loads(path.read_text())
    data["traceEvents"] = [
        {key: value for key, value in event.items() if key != "args" or event["ph"] == "M"}
        for event in data["traceEvents"]
        if event["ph"] == "M" or (event["ph"] == "X" and event.get("cat") in _KEPT)
    ]
    to.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name in CHUNKS:
        trace_own(name, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(_rank, (scratch,), nprocs=2)  # type: ignore[no-untyped-call]
        for found in sorted(Path(scratch).glob("*.json")):
            slim(found, Path(__file__).parents[1] / "data" / "kineto" / f"{found.stem}.pt.trace.json.gz")
