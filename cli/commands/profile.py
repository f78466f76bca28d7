"""`stagewright profile`: measures the costs of each part of a model on this machine, and of the links.

stagewright profile --out gpt.json                  the GPT of `stagewright train`, one microbatch
stagewright profile --model m.py:make --data m.py:batches --microbatch 4
stagewright profile --ranks 2 --out gpt.json        in two processes at once, with the contention of training
stagewright profile --links --ranks 2 --out us.json latency and bandwidth between local processes
torchrun ... -m stagewright profile --links         between the processes of a job
stagewright profile --from-json gpt.json            show a profile again
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from ...partition import Node, Profile, read_pipedream_profile
from ...partition.host_speeds import with_host_speeds
from ...schedules.wording import duration, size, wrapped
from ..options import GptOptions, check_out, given, plain_help, read, read_file, read_tensor_parallel, write_out
from ..tables import console, table
from ..train.options import DEFAULT_CLIP

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from ...comm import World
    from ...comm.links import MeasuredLinks

DEFAULT_RANKS = 2
T = TypeVar("T")
BUSY = 0.1  # spread of the whole step above which its figures are unreliable


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(GptOptions):
    """Measure every part of a model of your own, or of the example GPT: F, B, I, W, update, memory. Or the links
    between processes."""

    microbatch: int = 2  # Samples of one microbatch.
    dtype: Literal["float32", "bfloat16", "autocast"] = "float32"  # autocast: float32 weights, products in bfloat16.
    tensor: int = 1  # Ranks over which matrices are cut; measures one of them.
    tensor_parallel: str = "auto"  # How modules are cut: auto, or a JSON file of {pattern: column, row or sequence}.
    update: bool = True  # Also measure the optimizer's step and state.
    # Largest norm of all gradients, as the run's --clip: clipping is part of the update, and ranks wait for the norm.
    # 0: no clipping.
    clip: float = DEFAULT_CLIP
    device: Literal["cpu", "cuda"] = "cpu"  # Device of the model; with --links, of the messages.
    seconds: float = 10.0  # Time for the repetitions [s], without tracing and memory.
    from_json: Path | None = None  # Show this profile instead of measuring one.
    pipedream: Path | None = None  # Convert PipeDream's text (graph.txt) instead of measuring.
    links: bool = False  # Measure latency and bandwidth between processes instead; --out writes a cluster.
    # With --links: a profile of one model on each host, in the order of ranks; hosts of different speed become kinds of
    # devices (default: all count as equally fast).
    profiles: tuple[Path, ...] = ()
    # Local processes to start: for --links (default: 2), or to profile the model in all of them at once, with the
    # contention of training (default: 1). Under torchrun, its number of processes.
    ranks: int | None = None
    timeout: float = 60.0  # Longest time that a rank waits for another [s].
    out: Path | None = None  # Write JSON to this file.
    json: bool = False  # Print JSON and no tables.

    def check(self) -> None:
        for option in ("microbatch", "length", "tensor"):
            if getattr(self, option) < 1:
                raise ValueError(f"--{option} {getattr(self, option)}: expected at least 1")
        for option in ("seconds", "timeout"):
            if not getattr(self, option) > 0:
                raise ValueError(f"--{option} {getattr(self, option)}: expected a number above 0")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"--clip {self.clip}: expected a number above 0, or 0 for no clipping")
        chosen = [name for name in ("links", "from_json", "pipedream") if getattr(self, name)]
        self.check_own(given(self, ("layers", "width", "heads", "length")))
        chosen += ["model"] if self.model is not None else []
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join('--' + name.replace('_', '-') for name in chosen)}: expected one of them")
        if self.ranks is not None and (self.from_json or self.pipedream):
            raise ValueError(f"--ranks {self.ranks} with an existing profile: leave it away, it is for measuring")
        if self.ranks is not None and self.ranks < 1 + self.links:
            what = " with --links: expected at least 2, a link has two ends" if self.links else ": expected at least 1"
            raise ValueError(f"--ranks {self.ranks}{what}")
        if self.profiles and not self.links:
            raise ValueError("--profiles without --links: expected --links, whose cluster they say the speeds of")
        if self.out is not None and os.environ.get("RANK", "0") == "0":  # the one that writes
            check_out("--out", self.out, sources=[self.from_json, self.pipedream, *self.profiles])


def run(argv: Sequence[str]) -> int:
    options = read(ProfileOptions, argv, "profile")
    options.check()
    if options.links:
        return _links(options, argv)
    profile = _get(options, argv)
    if isinstance(profile, int):
        return profile
    if options.out is not None:
        write_out(options.out, profile.to_json())
    if options.json:
        print(profile.to_json())
    else:
        _show(profile)
    return 0


def _get(options: ProfileOptions, argv: Sequence[str]) -> Profile | int:
    if options.from_json is not None:
        return read_file(options.from_json, Profile.load)
    if options.pipedream is not None:
        return read_file(options.pipedream, read_pipedream_profile)
    if options.ranks is None and "WORLD_SIZE" not in os.environ:
        return measure(options)
    status = launched(argv, options.ranks)
    if status is not None:
        return status
    profile = profile_at_once(partial(measure, options), options.device, options.timeout)
    return 0 if profile is None else profile


def measure(options: ProfileOptions) -> Profile:
    """Profile the model that the options describe, with progress on standard error."""
    import torch

    from ...pipe.auto.runtime_seconds import clipping, measure_runtime_seconds
    from ...pipe.shards.cutting import profile_cut
    from ..train.corpus import loss_fn
    from ..train.gpt import GPT, GPTConfig
    from ..train.recipe import make_optimizer

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here: expected --device cpu")
    weights = torch.bfloat16 if options.dtype == "bfloat16" else None
    autocast = torch.bfloat16 if options.dtype == "autocast" else None
    if options.model is not None:
        from ..own_profile import profile_own

        found = profile_own(
            options,
            [options.microbatch],
            batch_size=None,
            seconds=options.seconds,
            device=options.device,
            dtype=weights,
            autocast=autocast,
            has_optimizer=options.update,
            max_grad_norm=options.clip,
            tensor_sizes=(options.tensor,),
            tensor_parallel=read_tensor_parallel(options.tensor_parallel),
        )
        return found[0]
    config = GPTConfig(length=options.length, layers=options.layers, width=options.width, heads=options.heads)
    torch.manual_seed(0)
    model = GPT(config).to(options.device, weights)
    shape = (options.microbatch, options.length)
    tokens, targets = (torch.randint(config.vocabulary, shape, device=options.device) for _ in range(2))
    profile = profile_cut(
        model,
        (tokens,),
        tensor=options.tensor,
        tensor_parallel=read_tensor_parallel(options.tensor_parallel),
        target=targets,
        loss_fn=loss_fn,
        optimizer=clipping(make_optimizer(lr=1e-3), options.clip) if options.update else None,
        autocast=autocast,
        seconds=options.seconds,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    action, around = measure_runtime_seconds(torch.device(options.device))
    return replace(profile, action_seconds=action, around_seconds=around, max_grad_norm=options.clip)


# --- what is printed ---


def folded(nodes: Sequence[Node]) -> list[tuple[Node, int]]:
    """Rows of the table: nodes timed together share the row of the first, with their number."""
    rows: dict[object, list[Node]] = {}
    for node in nodes:
        times = (node.forward_seconds, node.backward_seconds, node.input_grad_seconds, node.weight_grad_seconds)
        key = (*times, node.spread, node.parameter_bytes, node.stash_bytes, node.activation_bytes)
        rows.setdefault(key if node.spread else node.name, []).append(node)
    return [(group[0], len(group)) for group in rows.values()]


def _show(profile: Profile) -> None:
    out = console()
    of = "" if profile.microbatch_size is None else f", one microbatch of {profile.microbatch_size}"
    of += f", one of {profile.tensor} tensor ranks" if profile.tensor > 1 else ""
    heading = f"{len(profile.nodes)} parts on {profile.device}, {profile.dtype}{of} ({profile.origin})"
    out.print(heading, markup=False, soft_wrap=True)
    for rows in _tables(profile):
        out.print(rows)
    for line in summary(profile):
        out.print(wrapped(line), markup=False, highlight=False)


def _tables(profile: Profile) -> tuple[Table, Table]:
    seconds = table("", ("part",), ("F", "B", "I", "W", "update", "spread"))
    sizes = table("", ("part",), ("stash", "output", "workspace", "parameters"))
    for node, number in folded(profile.nodes):
        name = f"{node.name} x{number}" if number > 1 else node.name
        times = (node.forward_seconds, node.backward_seconds, node.input_grad_seconds, node.weight_grad_seconds)
        seconds.add_row(name, *map(duration, (*times, node.update_seconds)), f"{node.spread:.1%}")
        held = (node.stash_bytes, node.activation_bytes, node.workspace_bytes, node.parameter_bytes)
        sizes.add_row(name, *map(size, held))
    return seconds, sizes


def summary(profile: Profile) -> list[str]:
    """The lines below the table: times, memory by data structure, recomputation."""
    nodes, held = profile.nodes, profile.holdings()
    forward, backward = sum(n.forward_seconds for n in nodes), sum(n.backward_seconds for n in nodes)
    update = sum(n.update_seconds for n in nodes)
    lines = [
        "",
        f"time         F {duration(forward)}, B {duration(backward)}, update {duration(update)} a batch"
        + (f", clipping to {profile.max_grad_norm:g} in it" if profile.max_grad_norm and update else ""),
    ]
    if profile.action_seconds or profile.around_seconds:
        around = f"{duration(profile.action_seconds)} around each F, B, I and W, messages apart"
        around += f", {duration(profile.around_seconds)} around each step"
        lines.append(f"runtime      {around}")
    if profile.parts_over_step is not None and profile.step_seconds is not None:
        lines.append(
            f"whole step   {duration(profile.step_seconds)} (spread {profile.step_spread:.1%}) for F + B at once; "
            f"the sum of the parts is {profile.parts_over_step:+.1%} from it"
        )
        if profile.step_spread > BUSY:
            lines.append("             the machine was busy with other work, too: profile again when it is quiet")
    if profile.tensor > 1:
        sums, moved = (
            sum(getattr(n, f"forward_{what}") + getattr(n, f"backward_{what}") for n in nodes)
            for what in ("sums", "sum_bytes")
        )
        lines.append(
            f"sums         {sums:g} a microbatch over the {profile.tensor} tensor ranks, {size(moved)} on each, "
            f"not in these times: the planner knows the links"
        )
    known = "" if profile.optimizer_ratio is not None else " (optimizer not measured)"
    lines.append(
        f"memory       parameters {size(held.parameters)}, gradients {size(held.gradients)}, optimizer state "
        f"{size(held.optimizer)}{known}, activations {size(held.activations)} a microbatch, workspace "
        f"{size(held.workspace)}, buffers {size(held.buffers)}"
    )
    if held.activations:
        lines.append(
            f"recompute    all in one stage: {duration(forward)} more a microbatch (F again, "
            f"{forward / max(forward + backward, 1e-12):.0%} of F + B), keeps {size(held.activations)} less "
            f"between F and B but for the stage's inputs"
        )
    return lines


# --- links ---


def _links(options: ProfileOptions, argv: Sequence[str]) -> int:
    def profiles() -> list[Profile]:
        return [read_file(path, Profile.load) for path in options.profiles]

    if "WORLD_SIZE" not in os.environ:
        profiles()  # a mistake is told before ranks start
    status = launched(argv, options.ranks)
    if status is not None:
        return status
    measured = measured_links(options.device, options.timeout, check=profiles)
    if measured is not None:
        _show_links(*measured, options)
    return 0


def _show_links(measured: MeasuredLinks, memory: float, profiles: Sequence[Profile], options: ProfileOptions) -> None:
    from ...pipe.auto.layout import cluster_of

    cluster = cluster_of(measured, memory_bytes=memory)
    if profiles:
        cluster = with_host_speeds(cluster, measured.hosts, profiles, names=list(map(str, options.profiles)))
    if options.out is not None:
        write_out(options.out, cluster.to_json())
    if options.json:
        print(cluster.to_json())
        return
    rows = table("", ("level",), [])
    figures: dict[str, list[str]] = {}
    for level in measured.levels:
        speeds = [fit.bandwidth for fit in level.fits]
        rows.add_column(level.name, justify="right")
        for name, figure in {
            "joins": str(level.size),
            "latency": duration(level.latency),
            "busy, either end": duration(level.message_seconds),
            "busy a MB, either end": duration(1e6 / (level.message_bandwidth or math.inf)),
            "bandwidth": f"{size(level.bandwidth)}/s",
            "line off by": f"{level.residual:.0%}",
            "pairs": ", ".join(f"{a}-{b}" for a, b in level.pairs),
            "their bandwidths": f"{size(min(speeds))}/s .. {size(max(speeds))}/s",
            f"{size(level.seconds[0][0])} take": duration(level.seconds[0][1]),
            f"{size(level.seconds[-1][0])} take": duration(level.seconds[-1][1]),
            "all-reduce: bandwidth": f"{size(level.reduce_bandwidth)}/s",
            "all-reduce: a step": duration(level.reduce_latency),
            "all-reduce: of its time busy": f"{level.sum_busy:.0%}",
        }.items():
            figures.setdefault(name, []).append(figure)
    for name, each in figures.items():
        rows.add_row(name, *each)
    out = console()
    out.print("links, one way: seconds = 2 (busy + MB x busy a MB) + latency + bytes / bandwidth")
    out.print(rows)
    if profiles:
        kinds = {kind.name: kind.speed for kind in cluster.kinds}
        shown = ", ".join(f"{kinds[node]:g}" for node in cluster.nodes or ())
        of = "hosts" if len(cluster.nodes or ()) == len(measured.hosts) else "ranks"
        out.print(f"speeds of the {of}, of the first: {shown}", markup=False)
    else:
        out.print("speeds of devices are not measured: all count as equal (or: --profiles)")
    of = "its device" if options.device == "cuda" else "the host, which its ranks share evenly"
    out.print(f"memory of a rank: {size(memory)} of {of}", markup=False)
    if len(measured.levels) > 1 and measured.rings == "flat":
        out.print("sums go in one ring of all, each step as slow as its slowest link (gloo)")
    for note in measured.notes:
        out.print(wrapped(note), markup=False)


# --- several processes at once ---


def launched(argv: Sequence[str], ranks: int | None) -> int | None:
    """Start `stagewright profile` on each rank of this host, and return the exit status; None in a rank of a job.

    Raises ValueError for another number of ranks than the job has.
    """
    if (world := os.environ.get("WORLD_SIZE")) is None:
        from ..launcher import launch_command

        return launch_command(["profile", *argv], num_ranks=DEFAULT_RANKS if ranks is None else ranks)
    if ranks not in (None, int(world)):
        raise ValueError(f"--ranks {ranks} in one of {world} processes: leave --ranks away under torchrun")
    return None


def measured_links(device: str, timeout: float, *, check: Callable[[], T]) -> tuple[MeasuredLinks, float, T] | None:
    """Links between the ranks of this job, the least memory of a rank [bytes], and the result of `check`; None on all
    ranks but the first. Collective over them. `check` runs on the first rank before any measurement, and may read
    files of its host; its ValueError is raised on all ranks."""
    from ...comm import Collectives, MeshPlace
    from ...comm.links import measure_links
    from ...pipe.auto.layout import least_memory

    found: T | None = None
    wrong = ""
    with _world(device, timeout) as (world, on):
        try:
            found = check() if world.rank == 0 else None
        except ValueError as error:
            wrong = str(error)
        together = Collectives(MeshPlace.line(world), device=on, timeout=timeout)
        wrong = together.gather(wrong, what="reading what the links are measured for")[0]
        if wrong:
            together.close()
            raise ValueError(wrong)
        memory = least_memory(on, together)
        together.close()
        _tell(world, f"measuring the links of {world.size} ranks")
        started = time.perf_counter()
        links = measure_links(world, device=on, timeout=timeout, progress=lambda text: _tell(world, text))
        _tell(world, f"done in {duration(time.perf_counter() - started)}")
    return (links, memory, cast(T, found)) if world.rank == 0 else None


def profile_at_once(measure: Callable[[], Profile], device: str, timeout: float) -> Profile | None:
    """The median profile of all ranks of this job, measured at the same time and so with the contention of training;
    None on all ranks but the first. Collective over them.

    Raises ValueError on all ranks if they are on several hosts.
    """
    from ...comm import Collectives, MeshPlace
    from ...pipe.auto.layout import median_profile

    with _world(device, timeout) as (world, on):
        together = Collectives(MeshPlace.line(world), device=on, timeout=timeout)
        hosts = list(dict.fromkeys(together.gather(socket.gethostname(), what="finding the hosts of all ranks")))
        if len(hosts) > 1:
            raise ValueError(
                f"one profile of ranks on {', '.join(hosts)}: expected a profile of each host, `stagewright profile "
                f"--ranks N` there, which `stagewright profile --links --profiles FILE...` then compares"
            )
        _tell(world, f"{world.size} ranks profile at once")
        texts = together.gather(measure().to_json(), what="profiling the model on all ranks")
        together.close()
    return median_profile([Profile.from_json(text) for text in texts]).typical() if world.rank == 0 else None


@contextmanager
def _world(device: str, timeout: float) -> Iterator[tuple[World, torch.device]]:
    """The processes of this job and this one's device; reports errors inside to the launcher."""
    import torch
    import torch.distributed as dist

    from ...comm import join_world, own_device
    from ..launcher import report_to_launcher

    with report_to_launcher():
        on = own_device(torch.device(device))
        yield join_world(device=on, timeout=timeout), on
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
