"""What a device must show: every test here runs on the CPU each day, and unchanged on one CUDA device by `make gpu`.

Figures are printed and, by `make gpu`, kept in experiments/results/gpu with the device's name; none is judged but for
what must hold on any device.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gpu_report import note
from support.inside import profile_model
from torch import Tensor, nn
from torch.nn import functional as F

import stagewright as sw
from stagewright.partition import Cluster, plan
from stagewright.schedules import build, memory_curves, simulate, with_offload

DEVICE = os.environ.get("STAGEWRIGHT_DEVICE", "cpu")
IS_CUDA = DEVICE.startswith("cuda")
WIDTH, LAYERS, SAMPLES, M = (1024, 12, 64, 8) if IS_CUDA else (32, 4, 8, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # inductor imports it
]


class Block(nn.Module):
    """A block of a transformer without attention: norm, up, gelu, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def gpt(*, layers: int, width: int, words: int, heads: int) -> nn.Sequential:
    """Tokens [B, T] -> logits [B, T, words]."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(Attention(width, heads), Block(width)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words))


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))).to(DEVICE, dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype).to(DEVICE) for _ in range(2))
    return x, y


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def pipeline(model: nn.Module, schedule: Any = "1f1b", **options: Any) -> sw.PipelineModule:
    options = {"mesh": {"pipe": 2}, "num_microbatches": M, "loss_fn": F.mse_loss, "optimizer": adamw} | options
    return sw.PipelineModule(model, schedule=schedule, **options)


def _wait() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], repetitions: int = 5) -> float:
    step()
    found = []
    for _ in range(repetitions):
        _wait()
        begun = time.perf_counter()
        step()
        _wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_it_equals_plain_training(schedule: str) -> None:
    model, (x, y) = mlp(torch.float64), batch(torch.float64)
    twin = copy.deepcopy(model)
    optimizer = adamw(list(twin.parameters()))
    with pipeline(model, schedule) as pipe:
        for _ in range(3):
            loss = pipe.train_step(x, y).loss
            optimizer.zero_grad()
            for part, target in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
                expected = F.mse_loss(twin(part), target) / M
                expected.backward()
            optimizer.step()
        assert loss is not None
        for name, value in pipe.full_state_dict().items():
            assert torch.allclose(value, twin.state_dict()[name], rtol=1e-10, atol=1e-12), name
        assert all(parameter.device.type == torch.device(DEVICE).type for parameter in model.parameters())


def test_the_first_batch_is_verified_where_the_model_is() -> None:
    model, (x, y) = mlp(), batch()
    with pipeline(model, verify=True) as pipe:
        assert pipe.verify(x, y).num_gradients == len(list(model.parameters()))


def test_clocks_agree_with_the_simulator() -> None:
    """In one process ranks take turns: what a step took is the sum of its actions, and what lies between them."""
    x, y = batch()
    with pipeline(mlp()) as pipe:
        for _ in range(6):
            result = pipe.train_step(x, y)
        costs = pipe.measured_costs()
        timeline = result.timeline()
        predicted = simulate(pipe.schedule, costs).makespan
        step = seconds(lambda: pipe.train_step(x, y))
    work = sum(rank.busy for rank in timeline.ranks)
    note("clocks", work_of_a_step_s=work, whole_step_s=step, simulated_over_two_devices_s=predicted)
    assert 0 < work < 1.5 * step
    assert 0 < predicted < 1.5 * step


def test_memory_is_as_predicted() -> None:
    x, y = batch()
    with pipeline(mlp()) as pipe:
        pipe.train_step(x, y)
        with pipe.watch_memory() as memory:
            result = pipe.train_step(x, y)
        curves = memory_curves(result.timeline(), pipe.stage_bytes(memory))
    predicted = sum(curve.peak for curve in curves)  # two ranks in one process: at most the sum of their peaks
    note("memory", peak_bytes=memory.peak_bytes, predicted_bytes=predicted, ratio=memory.peak_bytes / predicted)
    assert 0.5 * predicted < memory.peak_bytes < 1.1 * predicted


def test_offloaded_activations_leave_the_device() -> None:
    x, y = batch()
    plain = build("gpipe", num_ranks=2, num_microbatches=M)
    found = {}
    for name, schedule in (("kept", plain), ("offloaded", with_offload(plain, share=1.0))):
        model = mlp()
        with pipeline(model, schedule, num_microbatches=None) as pipe:
            pipe.train_step(x, y)
            with pipe.watch_memory() as memory:
                pipe.train_step(x, y)
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            found[name] = memory.peak_bytes, seconds(lambda pipe=pipe: pipe.train_step(x, y)), weights
    (before, stays, kept), (after, moves, offloaded) = found["kept"], found["offloaded"]
    note("offload", peak_bytes=before, peak_bytes_offloaded=after, step_s=stays, step_s_offloaded=moves)
    assert all(map(torch.equal, kept, offloaded))
    assert after < before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near_float32(precision: str) -> None:
    x, y = batch()
    losses = {}
    for kind in (None, precision):
        with pipeline(mlp(), precision=kind) as pipe:
            losses[kind] = [pipe.train_step(x, y) for _ in range(4)]
    assert not any(result.skipped for result in losses[precision][2:])
    assert losses[precision][-1].loss == pytest.approx(losses[None][-1].loss, rel=0.05)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[] if IS_CUDA else pytest.mark.nightly)])
def test_compiled_units_compute_the_same(backend: str) -> None:
    x, y = batch()
    found = {}
    for compiled in (False, {"backend": backend}):
        with pipeline(mlp(), precision=sw.Precision(compile=compiled)) as pipe:
            losses = [pipe.train_step(x, y).loss for _ in range(2)]
            found[bool(compiled)] = losses, seconds(lambda pipe=pipe: pipe.train_step(x, y))
    note(f"compile {backend}", step_s=found[False][1], step_s_compiled=found[True][1])
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-4)


def test_overhead_beside_plain_training() -> None:
    model, (x, y) = mlp(), batch()
    twin = copy.deepcopy(model)
    optimizer = adamw(list(twin.parameters()))

    def plain() -> None:
        optimizer.zero_grad()
        for part, target in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            (F.mse_loss(twin(part), target) / M).backward()
        optimizer.step()

    with pipeline(model) as pipe:
        ours, theirs = seconds(lambda: pipe.train_step(x, y)), seconds(plain)
    note("engine beside plain training", step_s=ours, plain_s=theirs, ratio=ours / theirs)
    assert ours > 0


def test_a_gpt_is_profiled_planned_and_run() -> None:
    """300M parameters on CUDA (24 layers of 1,024), a small one on the CPU."""
    size = {"layers": 24, "width": 1024, "words": 32_000, "heads": 16} if IS_CUDA else {}
    model = gpt(**({"layers": 4, "width": 32, "words": 64, "heads": 4} | size)).to(DEVICE)
    words, length, samples = (32_000, 512, 8) if IS_CUDA else (64, 16, 8)
    tokens = torch.randint(words, (samples, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    profile = profile_model(model, (tokens[:2],), target=tokens[:2], loss_fn=loss_fn, optimizer=adamw, seconds=4.0)
    found = plan(profile, Cluster.from_levels([(2, 1e12)]), global_batch=samples, runnable=True)
    with sw.PipelineModule(model, schedule=found, loss_fn=loss_fn, optimizer=adamw) as pipe:
        losses = [pipe.train_step(tokens, tokens).loss for _ in range(4)]
        step = seconds(lambda: pipe.train_step(tokens, tokens), 3)
    number = sum(parameter.numel() for parameter in model.parameters())
    note("gpt", parameters=number, schedule=found.schedule, step_s=step, tokens_per_s=samples * length / step)
    assert losses[-1] < losses[0]
