"""Types of numbers: autocast to bfloat16, bfloat16 parameters, and the global gradient norm, against plain loops."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import near, train_alone, train_piped
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.small import WIDTH, X, Y, layers, make, stream
from support.tensor_models import MLP
from support.tensor_models import WIDTH as MLP_WIDTH
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

M = 4


class Island(Parts, inner=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float()).tanh()


def islands() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), Island())])


def plain_batch(model: nn.Module) -> None:
    """Gradients of one batch as torch advises: the forward under autocast, the backward not."""
    torch.clear_autocast_cache()
    for x, y in zip(X.tensor_split(M), Y.tensor_split(M), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y) * (len(x) / len(X))
        with torch.autocast("cpu", enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.thorough(but=["full"])
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "selective"])
def test_backwards_run_without_autocast(recompute: str) -> None:
    """A backward under it would cast the float32 products of an island."""
    model = islands()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with make(model=model, recompute=recompute, example_inputs=None, verify=recompute == "none") as pipe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                pipe.train_step(X, Y)
            plain_batch(plain)
            optimizer.step()
            optimizer.zero_grad()
        near(pipe.full_state_dict(), plain.state_dict(), atol=0.0)


def test_casts_of_weights_are_not_older_than_the_weights() -> None:
    """One autocast around a loop that evaluates, loads weights and steps an optimizer of its own between batches."""
    model = islands()
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    for value in other.parameters():
        value.data.mul_(1.5)
    pipe = make(model=model, optimizer=None, example_inputs=None)
    mine, theirs = None, torch.optim.SGD(plain.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        for step in range(4):
            pipe.forward_backward(X, Y)
            mine = torch.optim.SGD(pipe.parameters(), lr=0.1) if mine is None else mine
            mine.step()
            mine.zero_grad()
            shown = pipe.predict(X)
            assert isinstance(shown, Tensor)
            plain_batch(plain)
            theirs.step()
            theirs.zero_grad()
            torch.clear_autocast_cache()
            with torch.no_grad():
                assert torch.equal(shown, torch.cat([plain(x) for x in X.tensor_split(M)]))
            pipe.eval_step(X, Y)
            if step == 1:
                pipe.load_state_dict(other.state_dict())
                plain.load_state_dict(other.state_dict())
    near(pipe.full_state_dict(), plain.state_dict(), atol=0.0)
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_bfloat16_parameters(schedule: str) -> None:
    model, batches, adamw = layers().bfloat16(), [(X.bfloat16(), Y.bfloat16())] * 3, partial(torch.optim.AdamW, lr=0.01)
    plain = train_alone(copy.deepcopy(model), batches, adamw, parts=M, clip=0.1)
    pipe = make(model=model, optimizer=adamw, schedule=schedule, example_inputs=None, max_grad_norm=0.1)
    found = train_piped(pipe, batches)
    assert found.norms == pytest.approx(plain.norms, rel=1e-2)
    near(found.state, plain.state, rtol=0.02, atol=1e-3)


NORMS = [1.0, 2.0, 3.0, math.inf]


def norms_of_a_pipeline(mesh: dict[str, int], tied: bool) -> list[Any]:
    """By norm type: (the norm, gradients after clipping to half of it), and with a NaN in one gradient."""
    x, y = X.double(), Y.double()
    pipe = make(model=model_of(tied), mesh=mesh, optimizer=None, num_microbatches=2 * mesh["pipe"], example_inputs=(x,))
    found: list[Any] = []
    for norm_type in NORMS:
        pipe.forward_backward(x, y)
        norm = pipe.clip_grad_norm_(1e9, norm_type)
        assert pipe.clip_grad_norm_(norm / 2, norm_type) == norm
        found.append((norm, {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}))
        for parameter in pipe.parameters():
            parameter.grad = None
    pipe.forward_backward(x, y)
    for name, parameter in pipe.named_parameters():
        if name == "1.bias":
            parameter.grad = torch.full_like(parameter, math.nan)
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match=f"of order {norm_type:g} over all stages is nan"):
            pipe.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        assert math.isnan(pipe.clip_grad_norm_(math.inf, norm_type))
    pipe.close()
    return found


def model_of(tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = layers().double()
    if tied:
        model[5].weight = model[0].weight
    return model


def assert_norms(found: list[Any], *, tied: bool) -> None:
    plain = model_of(tied)
    for norm_type, (norm, gradients) in zip(NORMS, found, strict=True):
        plain.zero_grad()
        F.mse_loss(plain(X.double()), Y.double()).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), norm / 2, norm_type).item()
        assert norm == pytest.approx(expected, rel=1e-12), norm_type
        own = {name: p.grad for name, p in plain.named_parameters() if name in gradients}
        near({name: gradients[name] for name in own}, own, rtol=1e-10, atol=1e-13, where=f"{norm_type} ")


@pytest.mark.parametrize("tied", [False, True])
def test_norm_types(tied: bool) -> None:
    assert_norms(norms_of_a_pipeline({"pipe": 2, "data": 2}, tied), tied=tied)


def test_norm_types_over_processes(gloo: Pool) -> None:
    for found in gloo.run(norms_of_a_pipeline, ranks=4, args=({"pipe": 2, "data": 2}, True)):
        assert_norms(found, tied=True)


def test_norm_types_that_there_are_not() -> None:
    with make() as pipe:
        pipe.forward_backward(X, Y)
        for norm_type in (0, -1.0, "2", math.nan):
            with pytest.raises(ValueError, match=r"norm_type=.*expected a number above 0"):
                pipe.clip_grad_norm_(1.0, norm_type)
        assert pipe.clip_grad_norm_(1.0, "inf") > 0  # type: ignore[arg-type]
    with stream() as pipe:
        pipe.train_step(X, Y)
        with pytest.raises(ValueError, match="max_grad_norm="):
            pipe.clip_grad_norm_(1.0, math.inf)


STEPS = 4
AT = (2, 1)  # the step and the process in which one member's part of a gradient overflows


class Overflowing(MLP):
    """The parameters of `up` alone see an infinite gradient, where it is switched on."""

    is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        nothing = self.up(h.detach())
        if self.is_bad:
            nothing.register_hook(lambda gradient: gradient + math.inf)
        return x + self.down(torch.tanh(self.up(h) + 0.0 * nothing))


def model() -> nn.Sequential:
    """Ties the bias of the first block's norm to that of the last one, on the other stage."""
    torch.manual_seed(0)
    made = nn.Sequential(*[Overflowing() for _ in range(4)]).double()
    made[3].norm.bias = made[0].norm.bias
    return made


def plain_norms() -> list[float]:
    made, (x, y) = model(), batch(0, MLP_WIDTH)
    F.mse_loss(made(x), y).backward()
    return [nn.utils.clip_grad_norm_(made.parameters(), math.inf, norm_type).item() for norm_type in NORMS]


def plain_state() -> tuple[dict[str, Tensor], list[float]]:
    """With clipping, without the update of the step that overflows; norms of the others."""
    batches = [batch(step, MLP_WIDTH) for step in range(STEPS) if step != AT[0]]
    found = train_alone(model(), batches, partial(torch.optim.SGD, lr=0.1, momentum=0.9), clip=0.1)
    return found.state, found.norms


def piped() -> dict[str, Any]:
    replica = dist.get_rank() // 2
    settings: dict[str, Any] = {
        "mesh": {"data": 2, "tensor": 2},
        "data_parallel": "zero1",
        "tensor_parallel": {"*.up": "column", "*.down": "row"},
        "num_microbatches": M // 2,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }

    def own(step: int) -> list[Tensor]:
        return [each.chunk(2)[replica] for each in batch(step, MLP_WIDTH)]

    norms = []
    with PipelineModule(model(), **records(schedule="1f1b", example_inputs=own(0)[:1], **settings)) as pipe:
        for norm_type in NORMS:
            pipe.forward_backward(*own(0))
            norms.append(pipe.clip_grad_norm_(1e9, norm_type))
            pipe.clip_grad_norm_(norms[-1] / 2, norm_type)
            assert pipe.clip_grad_norm_(1e9, norm_type) == pytest.approx(norms[-1] / 2, rel=1e-4)
            for parameter in pipe.parameters():
                parameter.grad = None
    made, results = model(), []
    own_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaled = records(schedule="1f1b", max_grad_norm=0.1, grad_scaler=own_scaler, **settings)
    with PipelineModule(made, **scaled) as pipe:
        for step in range(STEPS):
            made[0].is_bad = (step, dist.get_rank()) == AT
            results.append(pipe.train_step(*own(step)))
            made[0].is_bad = False
        return {
            "norms": norms,
            "state": pipe.full_state_dict(),
            "skipped": [result.skipped for result in results],
            "grad_norms": [result.grad_norm for result in results],
            "scale": own_scaler.get_scale(),
        }


@pytest.mark.thorough
def test_four_processes(gloo: Pool) -> None:
    """One tensor member's part of a gradient overflows, in one replica: nobody updates."""
    state, norms = plain_state()
    for found in gloo.run(piped, ranks=4):
        assert found["norms"] == pytest.approx(plain_norms(), rel=1e-11)
        assert found["skipped"] == [step == AT[0] for step in range(STEPS)]
        assert [norm for step, norm in enumerate(found["grad_norms"]) if step != AT[0]] == pytest.approx(norms)
        assert not math.isfinite(found["grad_norms"][AT[0]])
        assert found["scale"] == 1024.0  # grew behind two updates, shrank behind the skipped one
        near(found["state"], state, atol=1e-11)
