"""Forwards and backwards that run together over an expert group: exact, in one order, and exchanges are measured."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.experts import WIDTH, Listed, Stacked, batch, model
from support.pool import Pool
from torch import nn

from stagewright import Mesh, PipelineModule
from stagewright.schedules import Action, Collective, Op, build, with_overlap


def _schedule(name: str) -> Any:
    return with_overlap(
        build(name, num_ranks=2, num_microbatches=4, **({"num_chunks": 2} if name == "interleaved" else {}))
    )


class _Dropping(nn.Module):
    """Experts between masks: what follows an exchange draws numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Listed(), Stacked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.other(F.dropout(self.one(x), 0.4, self.training)), 0.4, self.training)


class _Fails(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        _Fails.count(where, "forward fails")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _Fails.count(ctx.where, "backward fails")
        return gradient, None

    @staticmethod
    def count(where: str, what: str) -> None:
        _Fails.calls += where == what
        if where == what and _Fails.calls > 9 and dist.get_rank() == 1:
            raise ValueError(what)


class _Failing(nn.Module):
    """After some microbatches one process's fails between two exchanges."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.one, self.other, self.where = Listed(), Stacked(), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(_Fails.apply(self.one(x), self.where))  # type: ignore[no-untyped-call]
        return out


def _layers(kind: str) -> list[nn.Module]:
    if kind.endswith("fails"):
        return [_Failing(kind) for _ in range(4)]
    if kind == "each":
        return [_Dropping() for _ in range(4)]
    if kind == "drops":
        return [_Dropping(), nn.Linear(WIDTH, WIDTH), _Dropping(), _Dropping()]
    return [Listed(), nn.Linear(WIDTH, WIDTH), Stacked(), Listed()]


def _trained(schedule: Any, kind: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses and weights of three steps, and the last step's timeline."""
    warnings.filterwarnings("ignore", message="the schedule splits the backward")  # experts give little to W
    rate = {"plain": 0.05, "drops": 1e-4}.get(kind, 1e-9)  # many layers of experts diverge soon
    with PipelineModule(
        model(*_layers(kind)),
        mesh=Mesh(pipe=2, expert=2),
        schedule=schedule,
        num_microbatches=4,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        verify=kind == "plain",
        **options,
    ) as pipe:
        results = [pipe.train_step(*batch(pipe.replica[0], step)) for step in range(3)]
        losses = [result.loss for result in results if result.loss is not None]
        if schedule.overlapped and not options:
            with pytest.raises(ValueError, match=r"watch_memory\(\) of a schedule"), pipe.watch_memory():
                pass
        return losses, pipe.full_state_dict(), results[-1].timeline()


def _plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plain = model(*_layers(kind))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        x, y = (torch.cat(both) for both in zip(*(batch(replica, step) for replica in range(2)), strict=True))
        loss = F.mse_loss(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, plain.state_dict()


def _differences(found: Any, expected: Any) -> float:
    losses = [abs(one - other) for one, other in zip(found[0], expected[0], strict=True)]
    return max([*losses, *(float((found[1][name] - x).abs().max()) for name, x in expected[1].items())])


@pytest.mark.thorough(but=["dualpipe"])
@pytest.mark.filterwarnings("ignore:the schedule splits the backward")  # experts give little to W
@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe"])
def test_in_one_process_pairs_run_one_after_the_other(name: str) -> None:
    expected, own = _plain("plain"), model(*_layers("plain"))
    with PipelineModule(
        own,
        schedule=_schedule(name),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    ) as pipe:
        batches = [[batch(replica, step) for replica in range(2)] for step in range(3)]
        whole = [[torch.cat(both) for both in zip(*each, strict=True)] for each in batches]
        losses = [pipe.train_step(*each).loss for each in whole]
        assert pipe.eval_step(*whole[0]).loss is not None
        with pipe.watch_memory() as watched:  # raises an error where they overlap
            pipe.forward_backward(*whole[0])
        assert watched.peak_bytes > 0
        assert _differences((losses, pipe.full_state_dict()), expected) < 1e-10


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe", "interleaved"])
def test_pairs_train_as_one_process(gloo: Pool, name: str) -> None:
    expected = _plain("plain")
    for found in gloo.run(_trained, ranks=4, args=(_schedule(name), "plain", {})):
        assert _differences(found, expected) < 1e-10


@pytest.mark.gloo
@pytest.mark.thorough
def test_random_numbers_are_those_of_the_same_order_without_pairs(gloo: Pool) -> None:
    schedule = _schedule("dualpipe-v")
    apart = replace(schedule, overlapped=())
    together, alone = (gloo.run(_trained, ranks=4, args=(each, "drops", {})) for each in (schedule, apart))
    for found, expected in zip(together, alone, strict=True):
        assert _differences(found, expected) == 0.0


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"recompute": "full"}], ids=str)
def test_where_they_do_not_overlap_pairs_run_one_after_the_other(gloo: Pool, options: dict[str, Any]) -> None:
    expected = _plain("plain")
    for found in gloo.run(_trained, ranks=4, args=(_schedule("dualpipe-v"), "plain", options)):
        assert _differences(found, expected) < 1e-10


@pytest.mark.gloo
def test_one_exchanges_while_the_other_computes_and_the_timeline_shows_it(gloo: Pool) -> None:
    schedule = _schedule("dualpipe-v")
    timelines = [found[2] for found in gloo.run(_trained, ranks=4, args=(schedule, "each", {}))]
    timeline = next(each for each in timelines if each is not None)
    together = timeline.schedule.together  # of both replicas
    for rank, trace in enumerate(timeline.ranks):
        spans = {span.what: span for span in trace.compute}
        of = {action: [each for each in trace.exchanges if each.what == _exchange(action)] for action in spans}
        pairs = [(forward, backward) for forward, backward in together.items() if forward in spans]
        assert pairs, rank
        for forward, backward in pairs:
            within = [each for each in of[backward] if spans[forward].start < each.start < spans[forward].end]
            turns = sorted([*((each.start, "f") for each in of[forward]), *((each.start, "b") for each in within)])
            assert [name for _, name in turns][:4] == ["f", "b", "f", "b"]
            # The backward's first exchange begins before the forward's first one is waited for, and so on.
            assert within[0].start < of[forward][0].end
            assert of[forward][1].start < within[0].end


def _exchange(action: Action) -> Collective:
    return Collective((action.stage,), Op.EXCHANGE, action.index)


def _fails(at: str) -> str:
    """What a process says whose experts fail in a pair."""
    try:
        _trained(_schedule("dualpipe-v"), at, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("at", ["forward fails", "backward fails"])
def test_an_error_in_a_pair_is_raised_everywhere(gloo: Pool, at: str) -> None:
    said = gloo.run(_fails, ranks=4, args=(at,))
    assert all(at in each for each in said), said
