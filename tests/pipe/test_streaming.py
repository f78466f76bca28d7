"""Asynchronous schedules from the user's side: results, changes from outside, checkpoints, errors, memory of a rank."""

import operator
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import TrainingWorker
from support.parts import GIVEN, Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from support.storages import Storages
from torch import nn

from stagewright.pipe import NonFiniteLossError, PipelineModule, StepResult
from stagewright.schedules import ScheduleError, build


def step(*pipes: PipelineModule, times: int = 1) -> None:
    for _ in range(times):
        for pipe in pipes:
            pipe.train_step(X, Y)


def equal(one: PipelineModule, other: PipelineModule) -> bool:
    first, second = one.full_state_dict(), other.full_state_dict()
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.thorough(but=["<lambda>0", "<lambda>1"])
@pytest.mark.parametrize("look", [lambda p: p.eval_step(X, Y), lambda p: p.full_state_dict(), lambda p: p.flush()])
def test_2bw_trains_the_same_whatever_drains_it(look: Callable[[PipelineModule], object]) -> None:
    plain, watched = (stream(max_grad_norm=1.0) for _ in range(2))  # norms make batches known late
    for number in range(5):
        step(plain, watched)
        if number % 2:
            look(watched)
    assert [result.loss_step for result in plain.flush()][-1:] == [4]
    assert plain.flush() == []  # what a flush returned does not come again
    assert equal(plain, watched)


def test_a_measured_timeline_spans_a_few_batches() -> None:
    pipe = stream()
    result: StepResult | None = None
    for _ in range(8):
        result = pipe.train_step(X, Y)
    assert result is not None
    timeline = result.timeline()
    assert timeline.schedule.is_asynchronous
    assert timeline.schedule.num_batches in (4, 5)
    assert 0 < timeline.bubble < 1
    assert timeline.batch_seconds < timeline.makespan
    assert {str(action)[1] for rank in timeline.ranks for action in rank.actions} == {"F", "B", "U"}


@pytest.mark.thorough(but=["2bw"])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "paci"])
def test_going_on_from_a_checkpoint_is_exact(schedule: str, tmp_path: Path) -> None:
    pipe = stream(schedule)
    step(pipe, times=3)
    pipe.save(tmp_path / "c")  # asked for in flight: it drains first
    again = stream(schedule)
    again.train_step(X, Y)
    again.load(tmp_path / "c")
    step(pipe, again, times=3)
    assert equal(pipe, again)


def test_a_checkpoint_goes_to_another_cut_and_another_schedule(tmp_path: Path) -> None:
    """Under 2bw with the weights before the newest, which it still uses."""
    pipe = stream()
    step(pipe, times=3)
    pipe.save(tmp_path / "c")
    wider = stream(mesh={"pipe": 3})
    wider.load(tmp_path / "c")
    step(pipe, wider, times=3)
    assert equal(pipe, wider)
    flush = make(schedule="1f1b")
    with pytest.warns(UserWarning, match="older weight versions of the rule '2bw' .*begins with the newest weights"):
        flush.load(tmp_path / "c")
    flush.train_step(X, Y)
    flush.save(tmp_path / "f")
    wider.load(tmp_path / "f")
    assert equal(flush, wider)
    wider.train_step(X, Y)


def test_parameters_changed_between_runs_are_taken_over() -> None:
    """Both versions become what the user set: the next batch runs on it."""
    pipe, fresh = stream(), stream()
    pipe.train_step(X, Y)
    pipe.flush()
    state = {name: torch.full_like(value, 0.1) for name, value in pipe.full_state_dict().items()}
    fresh.load_state_dict(state)
    with torch.no_grad():
        for name, parameter in pipe.named_parameters():
            if name.endswith("bias"):
                parameter.data = state[name].clone()
            else:
                parameter.copy_(state[name])
    step(pipe, fresh, times=3)
    assert equal(pipe, fresh)


def test_changed_parameters_reach_the_replicas_of_this_process() -> None:
    pipe = stream(build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1)))
    pipe.train_step(X, Y)
    pipe.flush()
    with torch.no_grad():
        pipe.parameters()[0].fill_(0.25)
    for optimizer in pipe.optimizers:
        optimizer.param_groups[0]["lr"] = 0.02
    pipe.train_step(X, Y)
    pipe.flush()
    assert pipe._building.pipeline is not None
    first, second, _ = (state.versions for state in pipe._building.pipeline.state.update.stages)
    assert first is not None
    assert second is not None
    for one, other in zip(first.own, second.own, strict=True):
        assert torch.equal(one, other)


def test_an_error_loses_what_was_under_way(tmp_path: Path) -> None:
    pipe = stream()
    pipe.save(tmp_path / "c")
    pipe.train_step(X, Y)
    said = (
        r"step 1, microbatch 0 is nan: the update of this step was not made; each stage has the weights of its last "
        r"update, and the batches in the pipeline are lost\..*clip \(max_grad_norm=1\.0\); to continue, load\("
    )
    with pytest.raises(NonFiniteLossError, match=said):
        pipe.train_step(X, Y * float("nan"))
    for call in (lambda: pipe.train_step(X, Y), pipe.flush):
        with pytest.raises(ValueError, match=r"were lost with NonFiniteLossError: .* Expected load\(folder\)"):
            call()
    pipe.load(tmp_path / "c")
    other = stream()
    step(pipe, other, times=2)
    assert equal(pipe, other)


def test_a_bad_batch_is_refused_before_anything_runs() -> None:
    pipe, other = stream(), stream()
    step(pipe, other)
    with pytest.raises(ValueError, match="a batch of 2 samples for 4 microbatches"):
        pipe.train_step(X[:2], Y[:2])
    step(pipe, other)
    assert equal(pipe, other)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda pipe: pipe.load_state_dict(layers().state_dict()), r"0 to 0 are in the pipeline: expected flush\(\)"),
        (lambda pipe: pipe.forward_backward(X, Y), "under the asynchronous schedule '2bw': .* Expected train_step"),
        (lambda pipe: pipe.clip_grad_norm_(1.0), r"under .* Expected PipelineModule\(..., max_grad_norm"),
    ],
    ids=["load_state_dict", "forward_backward", "clip_grad_norm_"],
)
def test_calls_that_do_not_go_with_batches_under_way(
    call: Callable[[PipelineModule], object], said: str, request: pytest.FixtureRequest
) -> None:
    pipe = stream()
    step(pipe)
    with pytest.raises(ValueError, match=f"{request.node.callspec.id} .*{said}"):
        call(pipe)


class Moving(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()


def test_an_optimizer_that_moves_parameters() -> None:
    pipe = stream(optimizer=lambda parameters: Moving(parameters, lr=0.1))
    message = r"optimizer of stage 1 .* put parameter .* into other memory: expected one that"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)


class Cached(nn.Module):
    def __init__(self, keep: Callable[[nn.Parameter], Any] = lambda weight: [weight]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.cache = keep(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.cache[0]


@pytest.mark.thorough(but=["Embedding-paci"])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "paci"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_writes_into_its_weight_is_refused(kind: type[nn.Embedding], schedule: str) -> None:
    first = kind(10, WIDTH, max_norm=0.5)
    with pytest.raises(ValueError, match=r"parameter '0.weight' belongs to Embedding.*\(max_norm=0.5\), which writes"):
        stream(stages=[first, nn.Linear(WIDTH, WIDTH)], schedule=schedule, example_inputs=(torch.zeros(4, 2).long(),))
    first.requires_grad_(False)
    stream(stages=[first, nn.Linear(WIDTH, WIDTH)], schedule=schedule, example_inputs=(torch.zeros(4, 2).long(),))


@pytest.mark.parametrize("schedule", ["2bw", "paci"])
def test_a_parameter_that_a_forward_does_not_take_from_its_module(schedule: str) -> None:
    """On the last stage no update comes between its forward and its backward, of which torch would complain."""
    pipe = stream(schedule, stages=[nn.Linear(WIDTH, WIDTH), Cached(lambda weight: (weight.t(),))])

    def train() -> None:
        pipe.train_step(X, Y)
        pipe.flush()

    message = r"a gradient of stage 1 .* went to parameter '1.weight' itself, .* self.weight"
    with pytest.raises(ValueError, match=message):
        train()


class Tied(Parts, weight=GIVEN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


WEIGHT = nn.Parameter(torch.eye(WIDTH))
WITH_ANOTHER = lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=0.1)  # noqa: E731
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "few microbatches": (
        {"num_microbatches": 2, "mesh": {"pipe": 4}},
        "num_microbatches=2 under 2bw: expected at least 3, the warm-up",
    ),
    "few batches": (
        {"schedule": build("2bw", num_ranks=2, num_microbatches=4, num_batches=2)},
        "schedule '2bw' spans 2 batches: expected at least 3",
    ),
    "no optimizer": ({"optimizer": None}, "'2bw' updates its weights while other batches run: expected optimizer="),
    "other parameters": ({"optimizer": WITH_ANOTHER}, r"SGD holds a parameter of shape \(3,\) that it was not given"),
    "kept elsewhere": ({"stages": [Cached(), nn.Linear(WIDTH, WIDTH)]}, "'0.weight' in its attribute 'cache' too"),
    "norm of stages alone": (
        {"schedule": "pipedream", "max_grad_norm": 1.0},
        r"max_grad_norm=1.0 under schedule 'pipedream': .* Expected schedule='2bw'",
    ),
    "tied stages alone": (
        {"schedule": "pipedream", "stages": [Tied(WEIGHT), Tied(WEIGHT)]},
        r"parameter '0.weight' is tied over the ranks \(0, 1\) .* Expected schedule='2bw'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_stream_can_be_made_of(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(ScheduleError if name == "few batches" else ValueError, match=said):
        stream(**options)


@pytest.mark.parametrize(
    ("name", "update_every", "said"),
    [
        ("pipedream", 1, r"microbatch 2 is nan: the update of microbatch 2 was not made; each stage has"),
        ("paci", 2, r"is nan: the update of microbatches 2 to 3 was not made; .* learning rate; to continue"),
    ],
)
def test_updates_within_a_batch_were_made_when_its_loss_is_not_finite(name: str, update_every: int, said: str) -> None:
    model = layers()
    pipe = stream(build(name, num_ranks=2, num_microbatches=4, update_every=update_every), model=model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    target = Y.clone()
    target[5] = float("nan")
    with pytest.raises(NonFiniteLossError, match=said):
        pipe.train_step(X, target)
    assert not any(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def _nan_in_one_batch() -> str:
    pipe = stream(mesh=None, timeout=120.0)
    pipe.train_step(X, Y)
    try:
        for _ in range(3):
            pipe.train_step(X, Y * float("nan"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.thorough
def test_every_rank_learns_why_a_stream_ended(gloo: Pool) -> None:
    for answer in gloo.run(_nan_in_one_batch, ranks=2):
        assert "the loss of step 1, microbatch 0 is nan" in answer, answer


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_leaves_the_model_its_own_parameters(fails: bool) -> None:
    """A version stands in for them while the module runs, and no longer, whatever the module does."""
    model, seen = layers(), list[nn.Parameter]()
    own = [*model.parameters()]

    def note(layer: nn.Module, inputs: object) -> None:
        seen.append(layer.weight)
        if fails and len(seen) == 6:
            raise RuntimeError("a broken layer")

    model[0].register_forward_pre_hook(note)
    pipe = stream(model=model)
    seen.clear()
    with pytest.raises(RuntimeError, match="a broken layer") if fails else nullcontext():
        step(pipe, times=3)
    assert seen[-1] is not own[0]
    assert all(map(operator.is_, model.parameters(), own))


@pytest.mark.thorough(but=["2bw-None"])
@pytest.mark.parametrize(
    ("schedule", "max_grad_norm"), [("2bw", None), ("2bw", 1.0), ("pipedream", None), ("paci", None)]
)
def test_what_a_rank_holds(schedule: str, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live storages between actions: weight versions with gradient sets, and activations of microbatches."""
    P, M = 3, 5
    hidden = [11, 19, 17]  # the summary of losses has 13 numbers of 8 bytes
    sizes = [[(WIDTH, width), (width, WIDTH)] for width in hidden]  # through widths that tell storages apart
    stages = [nn.Sequential(nn.Linear(*up, bias=False), nn.ReLU(), nn.Linear(*down, bias=False)) for up, down in sizes]
    pipe = stream(schedule, stages=stages, num_microbatches=M, mesh={"pipe": P}, max_grad_norm=max_grad_norm)
    storages = Storages()
    weights, activations = [0] * P, [0] * P
    work = TrainingWorker.run

    def watched(self: TrainingWorker, action: Any) -> None:
        work(self, action)
        for stage, width in enumerate(hidden):
            # up and down have as many elements; the versions that stood there before are not seen being made
            seen = storages.live[width * WIDTH * 4] / 2
            weights[stage] = max(weights[stage], int(seen))
            activations[stage] = max(activations[stage], storages.live[2 * width * 4])

    monkeypatch.setattr(TrainingWorker, "run", watched)
    x = torch.randn(2 * M, WIDTH)
    with storages:
        for one in pipe.parameters():
            storages.note(one)
        for _ in range(8):
            pipe.train_step(x, x)
    if schedule == "2bw":
        gradient_sets = 1 if max_grad_norm is None else 2
        assert weights == [2 + gradient_sets] * P
    elif schedule == "paci":
        assert weights == [2] * P  # one version, one gradient set
    else:
        assert weights == [P - stage + 1 for stage in range(P)]  # P - r versions, one gradient set
    assert activations == [P - stage for stage in range(P)]
