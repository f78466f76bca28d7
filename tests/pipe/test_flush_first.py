"""A stream whose first batches have a flush behind each update, against the replay of support/async_reference.py."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.alone import train_alone
from support.async_pipeline import make_pipeline, run
from support.async_reference import UNEVEN, AsyncCase, AsyncOutcome, agree, make_batch, make_model, replay
from support.cases import same
from support.failing import refusal
from support.inside import RunFile, find_traces, read_run, read_traces
from support.pool import Pool
from support.records import records
from support.reference import copied
from support.small import X, Y, layers, sgd, stream
from torch import Tensor, nn

from stagewright.pipe import NonFiniteLossError, PipelineModule
from stagewright.schedules import Costs, build, check, simulate, simulate_spread

CASE = AsyncCase(
    task="mlp", num_ranks=3, sizes=UNEVEN, flush_first=3, feedback=2.0, flushes=(1, 4), decay=True, optimizer="momentum"
)


@pytest.mark.thorough(
    but=[
        "{'task': 'conv-norm', 'num_ranks': 4, 'replicas': (2, 1, 1), 'max_grad_norm': 0.05, 'sizes': (11, 13, 8, 10)}"
    ]
)
@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "muon"},
        {"feedback_fresh": 0.0, "flushes": (), "flush_first": 2, "decay": "plateau"},
        {"task": "conv-norm", "num_ranks": 4, "replicas": (2, 1, 1), "max_grad_norm": 0.05, "sizes": UNEVEN[:4]},
        {"schedule": "pipedream", "optimizer": "adamw", "evals": (0, 2, 3), "flushes": ()},
        {"schedule": "pipedream", "num_microbatches": 2, "num_ranks": 4, "flushes": (), "flush_first": 2},
        {"schedule": "paci", "update_every": 2},
    ],
    ids=str,
)
def test_it_equals_one_process(change: dict[str, Any]) -> None:
    case = replace(CASE, **change)
    agree(run(case), case)


def _trained(pipe: Any, case: AsyncCase, steps: range, folder: Path | None = None) -> dict[str, Tensor]:
    """The weights and all that the optimizers keep behind these steps; each is saved, which drains the pipeline."""
    for t in steps:
        inputs, target = make_batch(case, t, case.sizes[t])
        pipe.train_step(*inputs, target)
        if folder is not None:
            pipe.save(folder / str(t))
    pipe.flush()
    found = copied(pipe.full_state_dict())
    for number, optimizer in enumerate(pipe.optimizers):
        for place, state in enumerate(optimizer.state.values()):
            found |= {f"{number} {place} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "task"), [("2bw", "mlp"), ("2bw", "small-tied"), ("pipedream", "mlp")])
def test_a_run_goes_on_from_either_part_and_from_between(schedule: str, task: str, tmp_path: Path) -> None:
    """Two stages in one process have an older version and an optimizer's state of a tied weight each, saved once."""
    case = replace(CASE, schedule=schedule, task=task, num_ranks=2, flush_first=2, flushes=(), update_every=2)
    whole = _trained(make_pipeline(case, make_model(case)), case, range(5), tmp_path)
    for saved in (0, 1, 2):
        pipe = make_pipeline(case, make_model(case))
        pipe.load(tmp_path / str(saved))
        same(f"from {saved}", _trained(pipe, case, range(saved + 1, 5), tmp_path / f"again-{saved}"), whole, 0.0)


def _pipe(**options: Any) -> PipelineModule:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"schedule": "2bw", "num_microbatches": 4, "mesh": {"pipe": 3}}
    settings |= {"optimizer": partial(torch.optim.SGD, lr=0.01), "example_inputs": (torch.zeros(8, 4),)} | options
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    return PipelineModule(model, **records(loss_fn=nn.functional.mse_loss, **settings))


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "paci"])
def test_timelines_and_traces_are_of_one_kind_of_batches(schedule: str, tmp_path: Path) -> None:
    """A timeline shows the last four batches; behind the first ones, those of the stream."""
    pipe, costs = _pipe(schedule=schedule, flush_first=5), Costs()
    with pipe, pipe.tracer(tmp_path, every=1) as tracer:
        kinds = []
        for _ in range(9):
            timeline = pipe.train_step(torch.ones(8, 4), torch.zeros(8, 4)).timeline()
            tracer.step()
            check(timeline.schedule)
            kinds.append((timeline.schedule.name, timeline.schedule.num_batches))
    with_flush = f"{schedule} with a flush"
    assert kinds == [(with_flush, min(t + 1, 4)) for t in range(5)] + [(schedule, min(t + 1, 4)) for t in range(4)]
    flushed = simulate(timeline.schedule, costs), simulate(pipe.schedule, costs)
    assert all(one.bubble == 0 for one in flushed)
    traces = read_traces(find_traces([tmp_path]))
    assert not traces.notes
    assert [(one.timeline.schedule.name, one.timeline.schedule.num_batches) for one in traces.steps] == kinds[3:]


@pytest.mark.thorough
@pytest.mark.parametrize(("flush_first", "name"), [(12, "2bw with a flush"), (20, "2bw with a flush"), (11, "2bw")])
def test_what_is_simulated_is_what_ran(flush_first: int, name: str, tmp_path: Path) -> None:
    with _pipe(flush_first=flush_first) as pipe:
        tracer = pipe.tracer(tmp_path, every=1)
        for _ in range(12):
            pipe.train_step(torch.ones(8, 4), torch.zeros(8, 4))
            tracer.step()
        assert tracer.close() is not None
    exhibit, file = read_run(tmp_path), RunFile.read(tmp_path)
    assert file.simulated.schedule.name == exhibit.measured[-1].timeline.schedule.name == name
    assert file.sampled is not None
    assert file.sampled.median == simulate_spread(file.simulated.schedule, file.costs, file.spread).median


def test_verify_and_changes_by_hand_between_the_first_batches() -> None:
    """Nothing is under way there: no flush is asked for, and what is written becomes every version."""
    pipe, x, y = _pipe(flush_first=2, verify=True), torch.ones(8, 4), torch.zeros(8, 4)
    pipe.train_step(x, y)
    pipe.verify(x, y)
    with torch.no_grad():
        for _, parameter in pipe.named_parameters():
            parameter.zero_()
    assert pipe.train_step(x, y).loss == pytest.approx(0.0)
    pipe.train_step(x, y)
    with torch.no_grad():
        next(iter(pipe.named_parameters()))[1].add_(1.0)
    with pytest.raises(ValueError, match="while batches 2 to 2 are in the pipeline"):
        pipe.train_step(x, y)


@pytest.mark.parametrize(
    ("options", "story"),
    [
        ({"schedule": "1f1b"}, "flush_first=2 under the schedule '1f1b', which flushes.*expected an asynchronous"),
        ({"schedule": "auto", "num_microbatches": None}, "flush_first=2 under the schedule 'auto'"),
        ({"flush_first": -1}, "flush_first=-1: expected a number of batches"),
        ({"flush_first": True}, "flush_first=True: expected a number of batches"),
        ({"flush_first": 0.3}, "flush_first=0.3: expected a number of batches"),
        ({"optimizer": None}, "flush_first=2 without an optimizer"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], story: str) -> None:
    with pytest.raises(ValueError, match=story):
        _pipe(**({"flush_first": 2} | options))


def _over_processes(case: AsyncCase, folder: str) -> tuple[AsyncOutcome, dict[str, Tensor], list[str]]:
    outcome = run(case)
    pipe = make_pipeline(case, make_model(case), data_parallel="zero1")
    _trained(pipe, case, range(3))
    pipe.save(folder)
    pipe.close()
    again = make_pipeline(case, make_model(case), data_parallel="zero1")
    again.load(folder)
    _trained(again, case, range(3, 5))
    state = copied(again.full_state_dict())
    again.close()
    cases = [replace(case, flush_first=number) for number in (torch.distributed.get_rank(), 1)]
    return outcome, state, [refusal(lambda case=case: make_pipeline(case, make_model(case)).close()) for case in cases]


@pytest.mark.thorough
def test_replicas_tied_weights_and_divided_updates_over_processes(gloo: Pool, tmp_path: Path) -> None:
    options = {"optimizer": "momentum", "sizes": UNEVEN[:5], "feedback": 1.0, "flush_first": 2, "max_grad_norm": 0.5}
    case = AsyncCase(task="small-tied", num_ranks=3, replicas=(2, 1), **options)  # type: ignore[arg-type]
    found = gloo.run(_over_processes, ranks=3, args=(case, str(tmp_path)))
    agree([outcome for outcome, _, _ in found], case)
    for _, state, told in found:
        same("state", state, replay(case).state, 1e-12)
        assert "flush_first=0" in told[0]
        assert told[1] == ""


BAD = X.clone()
BAD[5] = float("nan")  # the third microbatch of two
FAILING = {
    "2bw": r"step 1, microbatch 2 is nan: no update was made\. .* or clip \(max_grad_norm=1\.0\)$",
    "pipedream": r"no update was made from microbatch 2 on; those before it were made on every stage, and stay\.",
    "paci": r"no update was made from microbatch 2 on; .* lower the learning rate$",
}


@pytest.mark.thorough(but=["2bw"])
@pytest.mark.parametrize("name", FAILING)
def test_a_bad_batch_among_the_first_leaves_a_run_that_goes_on(name: str, tmp_path: Path) -> None:
    """As under 1f1b: the batch is tried again with the same number; what was updated before the bad loss stays."""
    options = {} if name == "2bw" else {"update_every": 2}
    schedule = build(name, num_ranks=2, num_microbatches=4, **options)
    pipe = stream(schedule, flush_first=3, num_microbatches=4, timeout=120.0)
    state = copied(pipe.full_state_dict())
    pipe.train_step(X, Y)
    for _ in range(2):
        with pytest.raises(NonFiniteLossError, match=FAILING[name]):
            pipe.train_step(BAD, Y)
    halves = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    if name == "2bw":
        plain = stream("1f1b", timeout=120.0)
        plain.train_step(X, Y)
        wanted = copied(plain.full_state_dict())
        plain.close()
    else:
        model = layers()
        model.load_state_dict(state)
        wanted = train_alone(model, [*halves, *[(BAD[:4], Y[:4])] * 2], sgd, parts=2).state
    same("weights behind a bad batch", pipe.full_state_dict(), wanted, 1e-6)
    pipe.save(tmp_path)
    again = stream(schedule, flush_first=3, num_microbatches=4, timeout=120.0)
    again.load(tmp_path)
    results = [[one.train_step(X, Y) for _ in range(4)] + one.flush() for one in (pipe, again)]
    losses = [[(r.loss_step, r.loss) for r in one] for one in results]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]][:2] == [1, 2]
    same("weights of a run that was loaded", pipe.full_state_dict(), again.full_state_dict(), 0.0)
    again.close()
    pipe.close()


@pytest.mark.parametrize(("flush_first", "goes_on"), [(3, True), (0, False)])
def test_an_error_of_the_users_among_the_first_batches(flush_first: int, goes_on: bool) -> None:
    """Before any update of its batch: nothing is lost where nothing else was under way."""
    calls: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 6:
            raise KeyError("trouble of the user's own")
        return nn.functional.mse_loss(output, target)

    pipe = stream(loss_fn=loss_fn, flush_first=flush_first)
    pipe.train_step(X, Y)
    with pytest.raises(KeyError):
        pipe.train_step(X, Y)
    if goes_on:
        assert pipe.train_step(X, Y).loss_step == 1
    else:
        with pytest.raises(ValueError, match=r"were lost with KeyError"):
            pipe.train_step(X, Y)
