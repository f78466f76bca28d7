"""Schedules that users write, and scripts of torch.distributed.pipelining: beside the model in one plain process.

Several forwards a backward; a first stage that all ranks share; a script moved over with few changed lines.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.alone import near
from support.inside import B, Constraints, F, I, SoFar, U, W, in_flight, in_order
from support.parts import Parts
from support.plain import MICROBATCHES, agree, batch, linear, made, piped, sgd
from support.records import records
from support.reference import gradients
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.nn.functional import mse_loss

from stagewright.pipe import PipelineModule
from stagewright.schedules import Action, Costs, Schedule, ScheduleError, check, lower_bound, simulate

M = MICROBATCHES


def two_blocks() -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(linear(), nn.Tanh()) for _ in range(2)])


class Recycled(Parts, passes=3, recorded=False, blocks=two_blocks):
    """Two blocks that run `passes` times, under no gradient all but the last, as AlphaFold's recycling does."""

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
    agree(lambda: Recycled(passes=passes), schedule=schedule, cut=None, mesh=None, recompute=recompute)


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
        num_ranks=num_ranks, num_microbatches=num_microbatches, rules=[in_flight(at_most=lambda rank: num_ranks - rank)]
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for n in range(4)})
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1, samples=8, out=2)


def stage_module(index: int, num_stages: int) -> nn.Module:
    """As the tutorial of torch.distributed.pipelining makes it: the whole model, and what the stage has not deleted."""
    model, share = Model(), 4 // num_stages
    for number in range(4):
        if number // share != index:
            del model.layers[str(number)]
    if index:
        model.embed = None  # type: ignore[assignment]
    if index < num_stages - 1:
        model.head = None  # type: ignore[assignment]
    return model


def train(model: Any, **options: Any) -> float | None:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": M, "loss_fn": nn.functional.mse_loss}
    return PipelineModule(model, **(settings | options)).forward_backward(*data()).loss


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [(Schedule1F1B, 2), (ScheduleGPipe, 2), (ScheduleInterleaved1F1B, 4)],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_classes_of_schedules_and_split_points_of_torch_are_taken(kind: Any, num_stages: int) -> None:
    """As where a script moves over, with the whole model in place of its stages."""
    cut = {f"layers.{number}": SplitPoint.BEGINNING for number in range(4 // num_stages, 4, 4 // num_stages)}
    model, plain, (x, y) = Model(), Model(), data()
    expected = nn.functional.mse_loss(plain(x), y)
    expected.backward()
    assert train(model, cut=cut, schedule=kind) == pytest.approx(expected.item(), abs=1e-14)
    near(gradients(model), gradients(plain), atol=1e-14)


def stage(module: nn.Module | None, index: int, num_stages: int) -> Any:
    made = object.__new__(PipelineStage)
    made.submod, made.stage_index, made.num_stages = module, index, num_stages  # type: ignore[assignment]
    return made


def schedule() -> Any:
    made = object.__new__(ScheduleGPipe)
    made._n_microbatches = 3
    return made


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own, of its own graphs
def test_what_torch_made_is_taken() -> None:
    """The Pipe of pipeline(), and all PipelineStages, in any order."""
    x, y = data()
    expected = nn.functional.mse_loss(Model()(x), y).item()
    pipe = pipeline(Model(), mb_args=(x[: 8 // M],), split_spec={"layers.2": SplitPoint.BEGINNING})
    stages = [stage(stage_module(index, 2), index, 2) for index in (1, 0)]
    for model in (pipe, stages):
        assert train(model) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: train(Model(), cut={"layers.1": SplitPoint.END}),
            r"cut=\{'layers.1': SplitPoint.END\}: expected SplitPoint.BEGINNING of the next module",
        ),
        (lambda: train(Model(), cut={"layers.1": 3}), r"cut=\{'layers.1': 3\}: expected SplitPoint.BEGINNING"),
        (
            lambda: train(stage(None, 1, 2)),
            r"PipelineStages \[1\] of 2: expected all of them on every rank, which keeps its own, or the whole model",
        ),
        (
            lambda: train(Model(), schedule=schedule()),
            r"schedule=ScheduleGPipe\(...\): expected its class: schedule=ScheduleGPipe, num_microbatches=3, loss_fn=",
        ),
    ],
)
def test_what_cannot_be_taken_says_what_to_type(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
