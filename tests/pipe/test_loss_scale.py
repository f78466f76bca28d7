"""float16 with a loss scale: `grad_scaler=` against plain loops with torch.amp.GradScaler, overflows at will.

Column 0 of a batch passes through all layers. Where it says so, the gradient of one layer's bias becomes infinite, that
of no other does: an update is skipped by all stages though only one of them saw a reason. A scaler does not ask for
float16: sums in another order are compared in float64, where casts do not make the last bit larger.
"""

import copy
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near
from support.parts import GIVEN, Backwards, Parts
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import NonFiniteLossError, PipelineModule, StepRecord

WIDTH, SAMPLES, M, DEPTH = 6, 8, 4, 4


class Layer(nn.Module):
    """Columns but the first through a linear layer, whose bias overflows where column 0 is `number`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flags = x[:, :1]
        is_bad = (flags == self.number).any()
        bias = Backwards.apply(self.bias, lambda gradient: torch.where(is_bad, math.inf, gradient))
        h = self.linear(x[:, 1:]).tanh() + bias
        return torch.cat([flags, h.to(x.dtype)], dim=1)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(number) for number in range(1, DEPTH + 1)]).to(dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 1:], target)


def batch(step: int, bad: dict[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Batch of a step; bad: microbatch -> the layer that overflows in it."""
    made = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, WIDTH + 1, generator=made), torch.randn(SAMPLES, WIDTH, generator=made)
    x[:, 0] = 0
    for k, number in bad.items():
        x[k * (SAMPLES // M), 0] = number
    return x.to(dtype), y.to(dtype)


# Overflows on the first, a middle and the last layer, two in a row, and enough good steps for two growths.
BAD: list[dict[int, int]] = [{}, {1: 1}, {}, {}, {0: 4}, {3: 2, 0: 3}, {}, {}, {}, {}, {2: 1}, {}]


scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**10, growth_interval=2)
# Its factors are no powers of two: another scale makes other last bits.
odd_scaler = partial(scaler, init_scale=1000.0, growth_factor=3.0, backoff_factor=0.3)
# Its eps is above rounding errors, which it would otherwise make larger.
adamw = partial(torch.optim.AdamW, lr=0.05, eps=1e-2)
decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7)


def half(dtype: torch.dtype = torch.float32) -> torch.autocast:
    return torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32)


def plain_run(*, clip: float | None = None, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """A loop of plain PyTorch, with torch's own unscale_, step and update."""
    own, scale, skipped, losses = model(dtype), odd_scaler(), list[bool](), list[float]()
    optimizer = adamw(own.parameters())
    scheduler = decay(optimizer)
    for step, bad in enumerate(BAD):
        x, y = batch(step, bad, dtype)
        losses.append(0.0)
        for each, target in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            with half(dtype):
                piece = loss_fn(own(each), target) * (len(each) / len(x))
            scale.scale(piece).backward()
            losses[-1] += piece.item()
        scale.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(own.parameters(), clip)
        scale.step(optimizer)
        before = scale.get_scale()
        scale.update()
        skipped.append(scale.get_scale() < before)
        if not skipped[-1]:
            scheduler.step()
        optimizer.zero_grad()
    return SimpleNamespace(model=own, clip=clip, scaler=scale, optimizer=optimizer, skipped=skipped, losses=losses)


def piped_run(schedule: str, clip: float | None = None, save: Path | None = None, **options: Any) -> dict[str, Any]:
    """Trains on all batches; with `save` half of them, and a new pipeline goes on from its checkpoint."""
    dtype = torch.float32 if clip is None else torch.float64
    told: list[StepRecord] = []

    def make() -> tuple[PipelineModule, torch.amp.GradScaler]:
        own = odd_scaler()
        settings: dict[str, Any] = {"schedule": schedule, "num_microbatches": M, "mesh": {"pipe": 2}}
        settings |= {"optimizer": adamw, "lr_scheduler": decay, "max_grad_norm": clip, "grad_scaler": own}
        settings |= {"loss_fn": loss_fn, "on_step": told.append}
        return PipelineModule(model(dtype), **records(**(settings | options))), own

    pipe, own = make()
    results: dict[int, Any] = {}
    for step, bad in enumerate(BAD):
        if save is not None and step == 6:
            with half():
                pipe.save(save)
            pipe.close()
            pipe, own = make()
            pipe.build(*batch(0, {}))
            pipe.load(save)
        with half(dtype):
            result = pipe.train_step(*batch(step, bad, dtype))
        if result.loss_step is not None:
            results[result.loss_step] = result
        for rest in pipe.flush() if step in (2, 7) else ():
            results[rest.loss_step or 0] = rest
    results.update({rest.loss_step or 0: rest for rest in pipe.flush()})
    found = {
        "state": pipe.full_state_dict(),
        "scaler": own.state_dict(),
        "skipped": [results[step].skipped for step in sorted(results)],
        "told": [(record.step, record.skipped) for record in told],
        "rates": {group["lr"] for optimizer in pipe.optimizers for group in optimizer.param_groups},
        "losses": [results[step].loss for step in sorted(results)],
        "steps": {int(state["step"]) for optimizer in pipe.optimizers for state in optimizer.state.values()},
    }
    pipe.close()
    return found


def agree(found: dict[str, Any], plain: SimpleNamespace, *, losses: bool = True) -> None:
    near(found["state"], plain.model.state_dict(), atol=0.0 if plain.clip is None else 1e-12)
    if losses:
        assert found["skipped"] == plain.skipped
        assert found["losses"] == pytest.approx(plain.losses, rel=1e-6)
    assert found["told"] == list(enumerate(plain.skipped))
    assert found["scaler"] == plain.scaler.state_dict()
    assert found["rates"] == {plain.optimizer.param_groups[0]["lr"]}
    assert found["steps"] == {len(BAD) - sum(plain.skipped)}


@pytest.mark.thorough(but=["interleaved-0.1-{}"])
@pytest.mark.parametrize(
    ("schedule", "clip", "options"),
    [
        ("1f1b", None, {"mesh": {"pipe": 4}, "recompute": "full"}),
        ("interleaved", 0.1, {}),
        ("1f1b", 0.1, {"mesh": {"pipe": 2, "data": 2}}),
    ],
    ids=str,
)
def test_skipped_updates(schedule: str, options: dict[str, Any], clip: float | None) -> None:
    dtype = torch.float32 if clip is None else torch.float64
    agree(piped_run(schedule, clip, **options), plain_run(clip=clip, dtype=dtype))


def test_the_scale_is_in_the_checkpoint(tmp_path: Path) -> None:
    agree(piped_run("1f1b", save=tmp_path), plain_run(), losses=False)


def test_a_checkpoint_without_a_scale_goes_on_with_the_scalers(tmp_path: Path) -> None:
    """A power of two changes no gradient of float64."""

    def trained(pipe: PipelineModule, *steps: int) -> dict[str, Tensor]:
        for step in steps:
            pipe.train_step(*batch(step, {}, torch.float64))
        return {name: value.clone() for name, value in pipe.full_state_dict().items()}

    options = {"dtype": torch.float64, "example_inputs": batch(0, {}, torch.float64)[:1]}
    plain, _ = small(grad_scaler=None, **options)
    scaled, _ = small(grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0), **options)
    trained(plain, 0, 1, 2)
    plain.save(tmp_path)
    scaled.load(tmp_path)
    near(trained(scaled, 3, 4, 5), trained(plain, 3, 4, 5), atol=0.0)


@pytest.mark.thorough(but=["1f1b-{}"])
@pytest.mark.parametrize(("schedule", "options"), [("1f1b", {}), ("interleaved", {"data_parallel": "fsdp"})], ids=str)
def test_over_processes(gloo: Pool, schedule: str, options: dict[str, Any]) -> None:
    plain = plain_run(clip=0.1, dtype=torch.float64)
    for found in gloo.run(piped_run_here, ranks=4, args=(schedule, options)):
        agree(found, plain)


def piped_run_here(schedule: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each data replica passes every other microbatch of the batch, as one process would share them out."""
    import torch.distributed as dist

    replica = dist.get_rank() % 2
    train_step = PipelineModule.train_step

    def own_part(self: PipelineModule, x: Tensor, y: Tensor) -> Any:
        return train_step(self, *[torch.cat(each.tensor_split(M)[replica::2]) for each in (x, y)])

    PipelineModule.train_step = own_part  # type: ignore[assignment,method-assign]
    try:
        return piped_run(schedule, 0.1, mesh={"pipe": 2, "data": 2}, **options)
    finally:
        PipelineModule.train_step = train_step  # type: ignore[method-assign]


def small(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[PipelineModule, torch.amp.GradScaler]:
    settings: dict[str, Any] = {"num_microbatches": M, "loss_fn": loss_fn, "optimizer": adamw, "mesh": {"pipe": 2}}
    settings |= {"grad_scaler": scaler()} | options
    return PipelineModule(model(dtype), **records(**settings)), settings["grad_scaler"]


def test_an_infinite_loss_is_skipped_and_the_next_batch_trains() -> None:
    pipe, own = small()
    x, y = batch(0, {})
    results = []
    for target in (y, torch.full_like(y, math.inf), y):
        with half():
            results.append(pipe.train_step(x, target))
    assert [result.skipped for result in results] == [False, True, False]
    assert [math.isfinite(result.loss or 0.0) for result in results] == [True, False, True]
    assert own.get_scale() == 2.0**9
    pipe.close()


def test_verify_leaves_the_scale_alone() -> None:
    pipe, own = small(max_grad_norm=0.1)
    with half():
        pipe.train_step(*batch(1, {0: 1}))
        pipe.train_step(*batch(2, {}))
        before = own.state_dict()
        assert pipe.verify(*batch(3, {})).num_gradients == 2 * DEPTH
        assert own.state_dict() == before
        pipe.train_step(*batch(4, {}))
    assert own.get_scale() == 2.0**10  # two good updates in a row, one before verify
    pipe.close()


def test_the_scaler_is_the_users() -> None:
    """Changes of it between two steps count."""
    pipe, own = small()
    with half():
        pipe.train_step(*batch(0, {}))
        own.load_state_dict({**own.state_dict(), "scale": 64.0, "_growth_tracker": 1})
        pipe.train_step(*batch(1, {}))
        assert own.state_dict()["scale"] == 128.0
    pipe.close()


def test_gradients_of_several_batches_add_up_scaled() -> None:
    pipe, own = small()
    plain = model(torch.float32)
    optimizer = adamw(plain.parameters())
    with half():
        pipe.forward_backward(*batch(0, {}))
        with pytest.raises(ValueError, match=r"clip_grad_norm_ with grad_scaler=.* Expected .*max_grad_norm="):
            pipe.clip_grad_norm_(1.0)
        assert not pipe.train_step(*batch(1, {})).skipped
    for step in range(2):
        for x, y in zip(*(each.tensor_split(M) for each in batch(step, {})), strict=True):
            with half():
                loss = loss_fn(plain(x), y) / M
            own.scale(loss).backward()
    own.unscale_(optimizer)
    optimizer.step()
    near(pipe.full_state_dict(), plain.state_dict(), atol=1e-6)
    pipe.close()


def test_what_cannot_be() -> None:
    for schedule in ("2bw", "pipedream"):
        with pytest.raises(ValueError, match=rf"grad_scaler= under the asynchronous schedule '{schedule}': .*='1f1b'"):
            small(schedule=schedule, example_inputs=batch(0, {})[:1])
    with pytest.raises(ValueError, match=r"grad_scaler=65536.0: expected torch.amp.GradScaler\('cpu' or 'cuda'\)"):
        small(grad_scaler=65536.0)
    with pytest.raises(ValueError, match=r"grad_scaler=.* without an optimizer"):
        small(optimizer=None)
    pipe, _ = small(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    with half(), pytest.raises(ValueError, match=r"autocast\('cpu', dtype=torch.float16\) .* precision='fp16'"):
        pipe.train_step(*batch(0, {}))
    pipe.close()


class Inside(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), how=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cast":
            return self.linear(x).half().float()
        with torch.autocast("cpu", torch.float16, enabled=self.how == "autocast"):
            return self.linear(x).float()


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_float16_inside_a_module_wants_a_scale_too(schedule: str) -> None:
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    places = {
        "autocast": "stage 1 computes with parameter '3.linear.(weight|bias)' in torch.float16",
        "cast": "stage 1 computes with parameter '3.linear.(weight|bias)' in torch.float16",
        "none": None,
    }
    for how, message in places.items():
        chain = nn.Sequential(*[Inside(how if i == 3 else "none") for i in range(4)])
        for own in (None, scaler()) if schedule == "1f1b" else (None,):
            settings: dict[str, Any] = {"schedule": schedule, "num_microbatches": M, "mesh": {"pipe": 2}}
            pipe = PipelineModule(
                copy.deepcopy(chain), **records(loss_fn=F.mse_loss, optimizer=adamw, grad_scaler=own, **settings)
            )
            if message is not None and own is None:
                assert isinstance(pipe.predict(x), Tensor)
                with pytest.raises(ValueError, match=rf"{message}, .* precision='fp16'"):
                    pipe.train_step(x, y)
            else:
                pipe.train_step(x, y)
            pipe.close()


def test_a_scale_that_has_shrunk_to_nothing_is_an_error() -> None:
    pipe, _ = small(grad_scaler=scaler(init_scale=2.0**-149))
    x, y = batch(0, {})
    with half(), pytest.raises(NonFiniteLossError, match="the loss scale has shrunk to 0"):
        pipe.train_step(x, torch.full_like(y, math.inf))
