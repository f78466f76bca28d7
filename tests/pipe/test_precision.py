"""Types of numbers: autocast to bfloat16, bfloat16 parameters, and the global gradient norm, against plain loops."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import near
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.small import WIDTH, X, Y, layers, make, stream
from torch import Tensor, nn

from stagewright.pipe import PipelineModule

M = 4


class Island(Parts, inner=lambda: nn.Linear(WIDTH, WIDTH)):
    """A layer that computes in float32, whatever is around it."""

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


def equal(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(state[name], value) for name, value in model.state_dict().items())


# --- autocast ---


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
        assert equal(plain, pipe.full_state_dict())


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
    assert equal(plain, pipe.full_state_dict())
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_bfloat16_parameters(schedule: str) -> None:
    model = layers().bfloat16()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    options: dict[str, Any] = {"schedule": schedule, "example_inputs": None, "max_grad_norm": 0.1}
    with make(model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), **options) as pipe:
        for _ in range(3):
            result = pipe.train_step(X.bfloat16(), Y.bfloat16())
            for x, y in zip(X.bfloat16().tensor_split(M), Y.bfloat16().tensor_split(M), strict=True):
                (F.mse_loss(plain(x), y) / M).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-2)
            optimizer.step()
            optimizer.zero_grad()
        near(pipe.full_state_dict(), plain.state_dict(), rtol=0.02, atol=1e-3)


# --- the global norm ---

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


MESH_WIDTH, STEPS = 4, 4
PIPE, DATA = {"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 2}
AT = (2, 1)  # the step and the process in which one member's part of a gradient overflows


class _Overflow(torch.autograd.Function):
    """The identity; the gradient is infinite, where it is switched on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: MLP) -> Tensor:
        ctx.is_bad = mlp.is_bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (math.inf if ctx.is_bad else 1.0), None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MESH_WIDTH)
        self.up, self.down = nn.Linear(MESH_WIDTH, 4 * MESH_WIDTH), nn.Linear(4 * MESH_WIDTH, MESH_WIDTH)
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        nothing = _Overflow.apply(self.up(h.detach()), self) * 0.0  # so that the parameters of `up` alone see it
        return x + self.down(torch.tanh(self.up(h) + nothing))


def model() -> nn.Sequential:
    """Ties the bias of the first block's norm to that of the last one, on the other stage."""
    torch.manual_seed(0)
    made = nn.Sequential(*[MLP() for _ in range(4)]).double()
    made[3].norm.bias = made[0].norm.bias
    return made


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def plain_norms() -> list[float]:
    found = []
    for norm_type in NORMS:
        made = model()
        F.mse_loss(made(batch(0, MESH_WIDTH)[0]), batch(0, MESH_WIDTH)[1]).backward()
        found.append(nn.utils.clip_grad_norm_(made.parameters(), 1.0, norm_type).item())
    return found


def plain_state(*, delay: int, skipped: int | None) -> tuple[dict[str, Tensor], list[float]]:
    """With clipping, without the update of the step that overflows; norms of the others."""
    made, norms = model(), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    versions = [copy.deepcopy(made.state_dict())]
    for step in range(STEPS):
        used = model()
        used.load_state_dict(versions[max(step - delay, 0)])
        F.mse_loss(used(batch(step, MESH_WIDTH)[0]), batch(step, MESH_WIDTH)[1]).backward()
        if step != skipped:
            for own, leaf in zip(made.parameters(), used.parameters(), strict=True):
                own.grad = leaf.grad
            norms.append(nn.utils.clip_grad_norm_(made.parameters(), 0.1).item())
            optimizer.step()
        versions.append(copy.deepcopy(made.state_dict()))
    return versions[-1], norms


def piped(schedule: str, mesh: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """One process of the mesh."""
    num_replicas = mesh.get("data", 1)
    replica = dist.get_rank() // 2 % num_replicas
    settings: dict[str, Any] = {
        "mesh": mesh,
        "tensor_parallel": {"*.up": "column", "*.down": "row"},
        "num_microbatches": M // num_replicas,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }

    def own(step: int) -> list[Tensor]:
        return [each.chunk(num_replicas)[replica] for each in batch(step, MESH_WIDTH)]

    norms = []
    if schedule != "2bw":
        pipe = PipelineModule(model(), **records(schedule=schedule, example_inputs=own(0)[:1], **(settings | options)))
        for norm_type in NORMS:
            pipe.forward_backward(*own(0))
            norms.append(pipe.clip_grad_norm_(1e9, norm_type))
            pipe.clip_grad_norm_(norms[-1] / 2, norm_type)
            assert pipe.clip_grad_norm_(1e9, norm_type) == pytest.approx(norms[-1] / 2, rel=1e-4)
            for parameter in pipe.parameters():
                parameter.grad = None
        pipe.close()
    made, own_scaler = model(), None if schedule == "2bw" else scaler()
    pipe = PipelineModule(
        made, **records(schedule=schedule, max_grad_norm=0.1, grad_scaler=own_scaler, **(settings | options))
    )
    results = []
    for step in range(STEPS):
        made[0].is_bad = own_scaler is not None and (step, dist.get_rank()) == AT
        results.append(pipe.train_step(*own(step)))
        made[0].is_bad = False
    results += pipe.flush()
    known = {result.loss_step: result for result in results}
    found = {
        "norms": norms,
        "state": pipe.full_state_dict(),
        "skipped": [known[step].skipped for step in range(STEPS)],
        "grad_norms": [known[step].grad_norm for step in range(STEPS)],
        "scale": None if own_scaler is None else own_scaler.get_scale(),
    }
    pipe.close()
    return found


ZERO1: dict[str, Any] = {"data_parallel": "zero1"}


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "mesh", "options"), [("1f1b", DATA, ZERO1), ("2bw", PIPE, {})], ids=str)
def test_four_processes(gloo: Pool, schedule: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """One tensor member's part of a gradient overflows, in one replica of one stage: nobody updates."""
    skipped = None if schedule == "2bw" else AT[0]
    state, norms = plain_state(delay=int(schedule == "2bw"), skipped=skipped)
    for found in gloo.run(piped, ranks=4, args=(schedule, mesh, options)):
        if found["norms"]:
            assert found["norms"] == pytest.approx(plain_norms(), rel=1e-11)
        assert found["skipped"] == [step == skipped for step in range(STEPS)]
        assert [norm for step, norm in enumerate(found["grad_norms"]) if step != skipped] == pytest.approx(norms)
        if skipped is not None:
            assert not math.isfinite(found["grad_norms"][skipped])
            assert found["scale"] == 1024.0  # grew behind two updates, shrank behind the skipped one
        near(found["state"], state, atol=1e-11)
