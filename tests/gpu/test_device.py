"""What a device must show: every test here runs on the CPU each day, and unchanged on one CUDA device by `make gpu`.

Figures are printed and, by `make gpu`, kept in experiments/results/gpu with the device's name; none is judged but for
what must hold on any device.
"""

import copy
import gc
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from support.gpu_report import adamw, note, plain_step, seconds
from support.inside import host_bandwidth, profile_model
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
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # its advice; both sides here compute in float32
]


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The device's memory is that of one test: cycles of the tests before go."""
    gc.collect()


class Block(nn.Module):
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


def pipeline(model: nn.Module, schedule: Any = "1f1b", **options: Any) -> sw.PipelineModule:
    options = {"mesh": {"pipe": 2}, "num_microbatches": M, "loss_fn": F.mse_loss, "optimizer": adamw} | options
    return sw.PipelineModule(model, schedule=schedule, **options)


@pytest.mark.thorough(but=["zb-h1"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_it_equals_plain_training(schedule: str) -> None:
    model, (x, y) = mlp(torch.float64), batch(torch.float64)
    twin = copy.deepcopy(model)
    optimizer = adamw(list(twin.parameters()))
    with pipeline(model, schedule) as pipe:
        for _ in range(3):
            loss = pipe.train_step(x, y).loss
            assert loss == pytest.approx(plain_step(twin, optimizer, F.mse_loss, (x, y), M), rel=1e-10)
        for name, value in pipe.full_state_dict().items():
            assert torch.allclose(value.cpu(), twin.state_dict()[name].cpu(), rtol=1e-10, atol=1e-12), name
        assert all(parameter.device.type == torch.device(DEVICE).type for parameter in model.parameters())


def test_the_first_batch_is_verified_where_the_model_is() -> None:
    model, (x, y) = mlp(), batch()
    with pipeline(model, verify=True) as pipe:
        assert pipe.verify(x, y).num_gradients == len(list(model.parameters()))


def test_clocks_agree_with_the_simulator() -> None:
    """In one process ranks take turns: what a step took is the sum of its actions, and what lies between them."""
    (x, y), took = batch(), list[float]()
    with pipeline(mlp()) as pipe:
        for _ in range(6):
            begun = time.perf_counter()
            result = pipe.train_step(x, y)
            took.append(time.perf_counter() - begun)
        costs = pipe.measured_costs()
        timeline = result.timeline()
        predicted = simulate(pipe.schedule, costs).makespan
        step = seconds(lambda: pipe.train_step(x, y))
    work = sum(rank.busy for rank in timeline.ranks)
    note("clocks", work_of_a_step_s=work, whole_step_s=step, simulated_over_two_devices_s=predicted)
    assert 0 < work < 1.5 * took[-1]  # of the same step: others take other times on a busy machine
    assert 0 < predicted < 1.5 * max(took)


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


def peak_and_step(treat: Callable[[nn.Module], dict[str, Any]]) -> tuple[int, float, list[Tensor]]:
    """Peak bytes, seconds and weights of a model of which many samples are under way, treated in some way."""
    gc.collect()  # the pipeline before
    samples = 8192 if IS_CUDA else 256
    x, y = (torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE) for _ in range(2))
    model = mlp()
    options = {"schedule": "gpipe"} | treat(model)
    with pipeline(options.pop("model", model), **options) as pipe:
        return watched(pipe, x, y)


def watched(pipe: sw.PipelineModule, x: Tensor, y: Tensor) -> tuple[int, float, list[Tensor]]:
    """Peak bytes, seconds and weights of the second step."""
    pipe.train_step(x, y)
    with pipe.watch_memory() as memory:
        pipe.train_step(x, y)
    weights = [parameter.clone().cpu() for parameter in pipe.full_state_dict().values()]
    return memory.peak_bytes, seconds(lambda: pipe.train_step(x, y), 3), weights


@pytest.mark.thorough
def test_offloaded_activations_leave_the_device() -> None:
    moves = with_offload(build("gpipe", num_ranks=2, num_microbatches=M), share=1.0)
    before, stays, kept = peak_and_step(lambda _: {})
    after, away, offloaded = peak_and_step(lambda _: {"schedule": moves, "num_microbatches": None})
    note("offload", peak_bytes=before, peak_bytes_offloaded=after, step_s=stays, step_s_offloaded=away)
    assert all(map(torch.equal, kept, offloaded))
    assert after < before


@pytest.mark.thorough
def test_offloading_is_planned_by_the_measured_link() -> None:
    """schedule="auto" where nothing may run again, with ample room and with less than is then wanted; on a CPU
    the link is assumed. Wide enough that computing takes longer than a link's way, else forwards run ahead of it."""
    samples, width = (8192, 6144) if IS_CUDA else (256, WIDTH)
    x, y = (torch.randn(samples, width, generator=torch.Generator().manual_seed(1)).to(DEVICE) for _ in range(2))
    link = host_bandwidth(torch.device(DEVICE), mock.Mock(gather=lambda value, **_: [value])) or 1e15

    def blocks() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return nn.Sequential(*(Block(width) for _ in range(4)))

    found: list[Any] = []
    for _ in range(2):
        limit = max(found[0].memory_bytes.values()) * (0.9 if IS_CUDA else 0.85) if found else 80e9
        with (
            pipeline(blocks(), sw.Auto(trials=0)) as pipe,
            mock.patch("stagewright.pipe.auto.layout.PROFILE_SECONDS", 2.0 if IS_CUDA else 0.2),
            mock.patch("stagewright.pipe.auto.layout.device_memory", return_value=limit),
            mock.patch("stagewright.pipe.auto.layout.host_bandwidth", return_value=link),
        ):
            auto: Any = pipe._building._auto
            found.append(auto.plan(pipe._given((x, y), {}), schedules=("gpipe",), recompute=("none", "offload")))
    stays, moves = found
    assert "offload" in [stage.recompute for stage in moves.stages]
    assert {stage.recompute for stage in stays.stages} == {"none"}
    assert max(moves.memory_bytes.values()) <= limit

    def carried_out(planned: Any) -> tuple[int, float, list[Tensor]]:
        gc.collect()  # the pipeline before
        with pipeline(blocks(), planned, mesh=None, num_microbatches=None) as pipe:
            return watched(pipe, x, y)

    del auto, pipe  # what planned holds the model that it profiled
    (before, step, kept), (after, away, offloaded) = map(carried_out, found)
    note("planned offload", link_bytes_per_s=link, peak_bytes=before, peak_bytes_offloaded=after,
         limit_of_a_rank=limit, step_s=step, step_s_offloaded=away, planned_s=stays.simulated_step_time,
         planned_s_offloaded=moves.simulated_step_time)  # fmt: skip
    assert all(map(torch.equal, kept, offloaded))
    assert after < before


@pytest.mark.thorough
def test_gelus_that_keep_less() -> None:
    def less(model: nn.Module) -> dict[str, Any]:
        edits = sw.edit(model)
        edits["*"].keep_less("gelu")
        return {"model": edits}

    before, stays, kept = peak_and_step(lambda _: {})
    after, again, smaller = peak_and_step(less)
    note("keep less gelu", peak_bytes=before, peak_bytes_less=after, step_s=stays, step_s_less=again)
    assert all(map(torch.equal, kept, smaller))
    assert after < before


def test_a_memory_budget_is_kept() -> None:
    """Half of what a stage takes without one, both stages in one process."""
    samples = 8192 if IS_CUDA else 256
    free = peak_and_step(lambda _: {})
    weights = 16 * sum(parameter.numel() for parameter in mlp().parameters())  # with gradients and AdamW's averages
    budget = (weights + (free[0] - weights) // 2) // 2 + 8 * samples * WIDTH  # a stage; batches are counted there too
    held = peak_and_step(lambda _: {"recompute": {"memory_budget": f"{budget / 1e6:.6f}MB"}})
    note("memory budget", peak_bytes=free[0], budget_of_a_stage=budget, peak_bytes_held=held[0],
         step_s=free[1], step_s_held=held[1])  # fmt: skip
    assert all(map(torch.equal, free[2], held[2]))
    assert held[0] <= 2 * budget


@pytest.mark.thorough
def test_edits_verify_on_the_device() -> None:
    x, _ = batch()
    edits = sw.edit(mlp())
    edits["0"].checkpoint()
    edits["1"].compile(backend="inductor" if IS_CUDA else "eager", gate=False)
    edits["[23]"].keep_less("gelu")
    edits.verify((x,))


@pytest.mark.thorough(but=["bf16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near_float32(precision: str) -> None:
    x, y = batch()
    losses = {}
    for kind in (None, precision):
        with pipeline(mlp(), precision=kind) as pipe:
            losses[kind] = [pipe.train_step(x, y) for _ in range(4)]
    assert not any(result.skipped for result in losses[precision][2:])
    assert losses[precision][-1].loss == pytest.approx(losses[None][-1].loss, rel=0.05)


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_gpt_is_profiled_planned_and_run() -> None:
    """300M parameters on CUDA (24 layers of 1,024), a small one on the CPU."""
    size = {"layers": 24, "width": 1024, "words": 32_000, "heads": 16} if IS_CUDA else {}
    model = gpt(**({"layers": 4, "width": 32, "words": 64, "heads": 4} | size)).to(DEVICE)
    words, length, samples = (32_000, 512, 8) if IS_CUDA else (64, 16, 8)
    tokens = torch.randint(words, (samples, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def slowly(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)

    profile = profile_model(model, (tokens[:2],), target=tokens[:2], loss_fn=loss_fn, optimizer=slowly, seconds=4.0)
    found = plan(profile, Cluster.from_levels([(2, 1e12)]), global_batch=samples, runnable=True)
    twin = copy.deepcopy(model)
    optimizer = slowly(list(twin.parameters()))
    with sw.PipelineModule(model, schedule=found, loss_fn=loss_fn, optimizer=slowly) as pipe:
        number = pipe.schedule.num_microbatches
        expected = [plain_step(twin, optimizer, loss_fn, (tokens, tokens), number) for _ in range(4)]
        losses = [pipe.train_step(tokens, tokens).loss for _ in range(4)]
        theirs = seconds(lambda: plain_step(twin, optimizer, loss_fn, (tokens, tokens), number), 3)
        step = seconds(lambda: pipe.train_step(tokens, tokens), 3)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    note("gpt", parameters=parameters, schedule=found.schedule, step_s=step, tokens_per_s=samples * length / step,
         plain_s=theirs, ratio=step / theirs)  # fmt: skip
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < losses[0]


class Net(nn.Module):
    """Blocks, and a parameter that other ways of drawing fill."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))
        self.turned = nn.Parameter(nn.init.trunc_normal_(nn.init.orthogonal_(torch.empty(WIDTH, 32)), std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) @ self.turned


@pytest.mark.thorough(but=["cpu"])
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_deferred_model_is_filled_on_the_device(where: str) -> None:
    """Drawn by the generator of the device where plain construction draws."""
    found = []
    x, _ = batch()
    for made in (nullcontext, sw.deferred):
        torch.manual_seed(0)
        context: AbstractContextManager[object] = made()
        with context, torch.device(DEVICE if where == "device" else "cpu"):
            model = Net()
        size = sum(parameter.nbytes for parameter in model.parameters())
        if IS_CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with pipeline(model, device=DEVICE, verify=False) as pipe:
            pipe.build(x, x[:, :32])
            if IS_CUDA and made is sw.deferred:
                peak = torch.cuda.max_memory_allocated()
                note(f"deferred-{where}", peak_over_weights=peak / size)
                assert peak <= 1.1 * size
            assert {parameter.device.type for parameter in model.parameters()} == {torch.device(DEVICE).type}
            losses = [pipe.train_step(x, x[:, :32]).loss for _ in range(2)]
            found.append((losses, pipe.full_state_dict()))
        del model, pipe
    (losses, plain), (deferred, filled) = found
    assert deferred == losses
    assert all(torch.equal(filled[name], value) for name, value in plain.items())
