"""Schedules that users write, run: several forwards a backward, and a first stage that all ranks share.

Beside the same model in one plain process, float64.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import B, Constraints, F, I, SoFar, U, W, in_flight, in_order
from support.plain import MICROBATCHES, agree, batch, linear, made, piped, sgd
from support.records import records
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stagewright.pipe import PipelineModule
from stagewright.schedules import Action, Costs, Schedule, ScheduleError, check, lower_bound, simulate

M = MICROBATCHES


class Recycled(nn.Module):
    """Two blocks that run `passes` times, under no gradient all but the last, as AlphaFold's recycling does."""

    def __init__(self, passes: int = 3, *, recorded: bool = False) -> None:
        super().__init__()
        self.passes, self.recorded = passes, recorded
        self.blocks = nn.ModuleList([nn.Sequential(linear(), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        start = x
        with torch.set_grad_enabled(self.recorded):
            for _ in range(self.passes - 1):
                for block in self.blocks:
                    x = block(x)
                x = x + start
        for block in self.blocks:
            x = block(x)
        return x


def recycling(passes: int = 3, placement: Any = "cyclic", *, split: bool = False) -> Schedule:
    """Several forwards a backward: stage 2p + r is block r in pass p."""
    late = [in_order(I), in_order(W), lambda s, m: I(s, m + 1).before(W(s, m))]
    backward = late if split else [in_order(B)]
    return Constraints(
        name="3F1B",
        num_ranks=2,
        num_microbatches=M,
        placement=placement,
        num_chunks=passes if placement == "cyclic" else None,
        without_backward=tuple(range(2 * passes - 2)),
        split_backward=split,
        rules=[in_order(F, key=lambda s, m: (m // 2, s, m)), *backward, in_flight(at_most=lambda rank: 3 - rank)],
    ).solve()


def interlaced(ranks: int, *, stages: int) -> Schedule:
    """Stage 0 on all ranks, microbatches in turn; the other stages one behind the other."""
    own = [stage % ranks for stage in range(stages - 1)]
    return Constraints(
        name="interlaced",
        num_microbatches=M,
        placement=[[0, *(1 + s for s, at in enumerate(own) if at == rank)] for rank in range(ranks)],
        rules=[in_order(F, key=lambda s, m: (m, s)), in_order(B, key=lambda s, m: (m, -s))],
    ).solve()


def test_3f1b_is_simulated_with_what_its_stages_hold() -> None:
    schedule = recycling()
    report = check(schedule)
    assert report.num_actions == M * (6 + 2)
    assert report.peak_activations == (3, 1)
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    timeline = simulate(schedule, costs)
    assert timeline.ranks[0].busy == M * (3 * 1.0 + 2.0)
    updates = [span.what for span in timeline.ranks[0].compute if span.what.op is U]
    assert updates == [U(4, 0)]  # of the stage that has a backward
    assert lower_bound(schedule, costs) <= timeline.makespan
    assert timeline.peak_activations == report.peak_activations
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert [edge.grad for edge in schedule.stage_edges] == [False, False, False, False, True]
    assert not schedule.forward_only().without_backward
    with pytest.raises(ScheduleError, match=r"stages without a backward, \(0, 1, 2, 3\), which a CSV table cannot say"):
        schedule.to_csv()


@pytest.mark.thorough(but=["none-passes-on-two-ranks"])
@pytest.mark.parametrize(
    ("passes", "placement", "split"),
    [
        pytest.param(3, "cyclic", False, id="3F1B"),
        pytest.param(3, "cyclic", True, id="split"),
        pytest.param(2, [[0, 3], [1, 2]], False, id="passes-on-two-ranks"),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_3f1b_trains_as_one_process_does(passes: int, placement: Any, split: bool, recompute: str) -> None:
    schedule = recycling(passes, placement, split=split)
    agree(lambda: Recycled(passes), schedule=schedule, cut=None, mesh=None, recompute=recompute)


def test_stages_without_backward_keep_nothing() -> None:
    """Inputs are gone with the forward: nothing waits for a backward."""
    seen: list[weakref.ref[Tensor]] = []

    model = made(Recycled)
    model.blocks[1][0].register_forward_pre_hook(lambda module, inputs: seen.append(weakref.ref(inputs[0])))
    settings: dict[str, Any] = {"loss_fn": mse_loss, "optimizer": sgd, "example_inputs": batch(0)[:1]}
    pipe = PipelineModule(model, **records(schedule=recycling(), **settings))
    seen.clear()
    pipe.train_step(*batch(0))
    gc.collect()
    assert len(seen) == 3 * M
    assert not [each for each in seen if each() is not None]


def test_a_gradient_that_no_backward_would_take_is_refused() -> None:
    message = r"output 0 of stage 0 \(blocks\.0\) requires a gradient, and schedule '3F1B' runs no"
    with pytest.raises(ValueError, match=message):
        piped(lambda: Recycled(recorded=True), schedule=recycling(), cut=None, mesh=None)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "the last": ({"without_backward": (1,)}, r"without_backward=\(1,\) of 2 stages: expected stages below 1"),
    "none there": ({"without_backward": (7,)}, r"without_backward=\(7,\) of 2 stages"),
    "stream": (
        {"without_backward": (0,), "weight_rule": "2bw"},
        r"under the rule '2bw': expected one batch under a ru",
    ),
    "surplus": (
        {"without_backward": (0,), "programs": ("0F0 0B0", "1F0 1B0")},
        r"0B0: stage 0 runs without a backward \(without_backward=\(0,\)\): expected its forwards alone",
    ),
    "not declared": (
        {"programs": ("0F0", "1F0 1B0")},
        r"missing: 0B0\..*stages that run under no gradient are declared: Schedule\(without_backward=\(0,\)\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_declared_must_be_so(options: dict[str, Any], message: str) -> None:
    programs: Sequence[str] = options.pop("programs", ("0F0", "1F0 1B0"))
    with pytest.raises(ScheduleError, match=message):
        check(
            Schedule(
                name="mine",
                placement=((0,), (1,)),
                programs=tuple(tuple(map(Action.parse, program.split())) for program in programs),
                num_microbatches=1,
                **options,
            )
        )


def chain() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())


@pytest.mark.parametrize(("ranks", "stages"), [(2, 3), (3, 4), (3, 3)])
def test_an_interlaced_schedule_trains_as_one_process_does(ranks: int, stages: int) -> None:
    schedule = interlaced(ranks, stages=stages)
    assert all(0 in own for own in schedule.placement)
    assert check(schedule).num_actions == 2 * M * stages
    agree(chain, schedule=schedule, cut=["1", "2", "4"][: stages - 1], mesh=None)


def one_and_one(num_ranks: int, num_microbatches: int) -> Constraints:
    return Constraints(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rules=[in_flight(at_most=lambda rank: num_ranks - rank)],
    )


def few(action: Action, so_far: SoFar) -> bool:
    return action.op is not F or so_far.in_flight < 2


def test_rules_functions_and_filters_are_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_rules.py").write_text(
        "from stagewright.schedules import build\n"
        "def mine(num_ranks=2, num_microbatches=4):\n"
        "    return build('gpipe', num_ranks=num_ranks, num_microbatches=num_microbatches)\n"
    )
    for schedule, mesh in (
        (one_and_one(3, M), None),
        (one_and_one, {"pipe": 3}),
        (few, {"pipe": 2}),
        (f"{tmp_path}/own_rules.py:mine", {"pipe": 3}),
        (f"{tmp_path}/own_rules.py:mine", None),
    ):
        model = made(chain)
        settings: dict[str, Any] = {"num_microbatches": M, "loss_fn": mse_loss, "example_inputs": batch(0)[:1]}
        pipe = PipelineModule(model, **records(schedule=schedule, mesh=mesh, **settings))
        x, y = batch(0)
        assert pipe.forward_backward(x, y).loss == pytest.approx(mse_loss(model(x), y).item(), abs=1e-12)
        assert pipe.num_ranks == (
            2 if mesh is None and isinstance(schedule, str) else 3 if mesh is None else mesh["pipe"]
        )
    with pytest.raises(ValueError, match=r"num_microbatches=3 for a schedule of 4: expected 4"):
        PipelineModule(made(chain), schedule=one_and_one(2, M), loss_fn=mse_loss, num_microbatches=3)
    with pytest.raises(ValueError, match=r"schedule='nowhere\.py:f': there is no file nowhere\.py"):
        PipelineModule(made(chain), schedule="nowhere.py:f", loss_fn=mse_loss)
