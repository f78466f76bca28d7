"""Parts of a step in one process with one thread, without torch.distributed.

halves         a backward in two halves, I and W, compared with the whole one
in_process     a step without compute: the engine's Python, and autograd below it
start          CPU seconds to the end of the first step: recording, cut, verification
"""

from __future__ import annotations

import cProfile
import gc
import importlib.util
import io
import pstats
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ...cli.train.gpt import GPT, Block, GPTConfig
from ...partition.model.split_backward import SplitBackward, WeightGradients
from ...pipe import PipelineModule
from ..jobs.case import Case
from ..jobs.figure import Figure, How, Target, repeated
from ..measure.models import StagesProblem, Workload, drop_gradients, make_problem
from ..measure.timing import ratios, typical

_RUNS, _WARM_UP = 7, 3  # of each repetition of the halves, and before all
_STEPS = 20  # of one repetition
_PROFILED_STEPS, _PROFILE_LINES = 50, 30


def _blocks(width: int) -> nn.Module:
    return nn.Sequential(*[Block(GPTConfig(width=width, heads=4, length=128)) for _ in range(4)])


STAGES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # and one microbatch's input
    **{
        f"GPT, 4 blocks of width {width}, length 128": (partial(_blocks, width), (4, 128, width))
        for width in (256, 512)
    },
    "8 Linears of width 64, 64 rows": (
        lambda: nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]),
        (64, 64),
    ),
}


def halves(case: Case, repetitions: int) -> Iterator[Figure]:
    """I + W over B for both sides, and our forward over the plain one.

        whole    F  B
        ours     F  I W      products, embeddings and convolutions defer gradients of weights
        torch    F  I W      torch.distributed.pipelining: a walk over the graph for each weight

    All three run the same stage on the same input in turn, `runs` times per repetition, whose value is the median.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = STAGES[case.text("stage")]
    model, x = make(), torch.randn(shape, requires_grad=True)
    gradient = torch.randn_like(model(x))
    sides = {"whole": _whole, "ours": _ours, "torch": _torchs}
    for side in sides.values():
        for _ in range(_WARM_UP):
            side(model, x, gradient)
    forward: dict[str, list[float]] = {name: [] for name in sides}
    backward: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(case.count("runs", _RUNS)):
            for name, side in sides.items():
                seen[name].append(side(model, x, gradient))
        for name, times in seen.items():
            forward[name].append(median(f for f, _ in times))
            backward[name].append(median(b for _, b in times))
    for name, seconds, side_name, target in (
        ("(I + W) / B, ours", backward, "ours", Target(limit=case.number("limit"))),
        ("(I + W) / B, torch", backward, "torch", None),
        ("F / F, ours", forward, "ours", None),
    ):
        yield from repeated(
            ratios(seconds[side_name], seconds["whole"]),
            case=Case.of({"case": case.text("case"), "run": case.text("stage")}),
            name=name,
            unit="ratio",
            how=How.MEASURED,
            target=target,
            note=f"over {typical(seconds['whole'])}",
        )


def _whole(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    torch.autograd.backward([y], [gradient])
    return middle - start, time.perf_counter() - middle


def _ours(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    split, weights = SplitBackward(), WeightGradients()
    start = time.perf_counter()
    with split.forward():
        y = model(x)
    middle = time.perf_counter()
    with split.backward(weights):
        torch.autograd.backward([y], [gradient])
    weights.add()
    return middle - start, time.perf_counter() - middle


def _torchs(model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    _, groups = stage_backward_input([y], [gradient], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    return middle - start, time.perf_counter() - middle


def in_process(case: Case, repetitions: int) -> Iterator[Figure]:
    """Seconds per microbatch of the in-process step and of a bare loop over the same forwards and backwards, in turn.

    With `profile` the note lists the most expensive functions of the step.
    """
    torch.set_num_threads(1)
    workload = Workload.of(case)
    problem, M = make_problem(workload), workload.num_microbatches
    pipe = PipelineModule(
        make_problem(workload).stages,
        schedule=workload.schedule,
        num_microbatches=M,
        num_chunks=workload.num_chunks,
        loss_fn=problem.loss_fn,
        example_inputs=(problem.inputs,),
        mesh={"pipe": workload.num_ranks},
        verify=False,
    )

    def pipeline() -> None:
        pipe.forward_backward(problem.inputs, problem.target)
        drop_gradients(pipe.parameters())

    def bare() -> None:
        _bare_step(problem, M)

    seconds: dict[str, list[float]] = {"in process": [], "autograd": []}
    for step in (pipeline, bare) * 2:
        step()
    for _ in range(repetitions):
        seconds["in process"].append(_seconds(pipeline) / M)
        seconds["autograd"].append(_seconds(bare) / M)
    note = _profile(pipeline) if case.get("profile") else ""
    shown = Case.of({"run": str(workload), "model": workload.model})
    for name, values in seconds.items():
        yield from repeated(values, case=shown, name=name, unit="s", how=How.MEASURED, note=note)


def start(case: Case, repetitions: int) -> Iterator[Figure]:
    """CPU seconds of `build()`, if in the case, and of the first step, which otherwise builds; a process each time.

    A plain step of the model runs first, so that torch's own loading is not counted. No figure for a model of
    transformers without that package.
    """
    del repetitions
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case.text("model") == "gpt2" and importlib.util.find_spec("transformers") is None:
        return
    model = _start_model(case.text("model"))
    tokens = torch.randint(0, 128, (8, 32))

    def loss_fn(output: object, target: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    loss_fn(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    optimizer(model.parameters()).step()
    drop_gradients(model.parameters())
    gc.collect()  # after the imports, else at a random time in one of the two
    pipe = PipelineModule(model, loss_fn=loss_fn, optimizer=optimizer, mesh={"pipe": 2}, num_microbatches=4)
    is_built = bool(case.get("built"))
    parts: dict[str, Callable[..., object]] = {"build()": pipe.build} if is_built else {}
    parts["step"] = pipe.train_step
    seconds = {}
    for name, part in parts.items():
        begin = time.process_time()
        part(tokens, tokens)
        seconds[name] = time.process_time() - begin
    shown = Case.of({"case": case.text("case"), "run": f"{case.text('model')}, 12 layers, two ranks in one process"})
    note = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items()) if is_built else ""
    name = "CPU, build() and first step" if is_built else "CPU, first step, which builds"
    yield Figure(case=shown, name=name, value=sum(seconds.values()), unit="s", how=How.MEASURED, note=note)


def _start_model(name: str) -> nn.Module:
    if name == "gpt":
        return GPT(GPTConfig(layers=12, width=64, length=32))
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 12, "n_embd": 64, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None))
    return model


def _bare_step(problem: StagesProblem, num_microbatches: int) -> None:
    """The minimum of autograd calls for the stages of a pipeline: each has its own leaf, graph and backward."""
    last = len(problem.stages) - 1
    inputs, targets = (each.tensor_split(num_microbatches) for each in (problem.inputs, problem.target))
    for x, target in zip(inputs, targets, strict=True):
        leaves, outputs = [], []
        for s, stage in enumerate(problem.stages):
            leaf = x.detach().requires_grad_(s > 0)
            out = stage(leaf) if s < last else problem.loss_fn(stage(leaf), target)
            leaves.append(leaf)
            outputs.append(out)
            x = out
        gradient = torch.full_like(outputs[-1], 1 / num_microbatches)
        for leaf, out in zip(reversed(leaves), reversed(outputs), strict=True):
            torch.autograd.backward((out,), (gradient,))
            if leaf.grad is not None:
                gradient = leaf.grad
    drop_gradients(parameter for stage in problem.stages for parameter in stage.parameters())


def _seconds(step: Callable[[], None]) -> float:
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


def _profile(step: Callable[[], None]) -> str:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(_PROFILED_STEPS):
        step()
    profiler.disable()
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).strip_dirs().sort_stats("tottime").print_stats(_PROFILE_LINES)
    return stream.getvalue()
