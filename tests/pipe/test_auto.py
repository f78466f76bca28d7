"""schedule="auto": measured, planned and run; one plan on every rank, and the training of one process."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import trials
from support.alone import near, train_alone, train_piped
from support.failing import refusal
from support.inside import (
    at_size,
    host_bandwidth,
    median_profile,
    outline,
    tell,
    tell_of_late_loss,
    tell_of_one_rank,
    told_if_slow,
)
from support.parts import GIVEN, Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.small import sgd
from support.trials import make_batch, profiled
from torch import Tensor, nn

from stagewright.comm import PeerLost
from stagewright.partition import Node, Plan, Profile
from stagewright.pipe import PipelineModule
from stagewright.schedules import Op

WIDTH = 6
X, Y = batch(0)


class Slow(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), seconds=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


def make_model() -> nn.Module:
    """The first layer takes four times as long as all others together, on a busy machine longer than they."""
    torch.manual_seed(2)
    return nn.Sequential(*[Slow(seconds) for seconds in (0.032, 0.002, 0.002, 0.002, 0.002)]).double()


def make_pipe(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"schedule": "auto", "trials": 0, "loss_fn": F.mse_loss, "optimizer": sgd}
    return PipelineModule(make_model(), **records(**({"timeout": 120.0} | settings | options)))


def run_auto(options: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    pipe = make_pipe(**options)
    state = train_piped(pipe, [(X, Y)] * 2).state
    return pipe.plan.to_json(), state


@pytest.mark.thorough
def test_every_rank_has_the_same_plan(gloo: Pool) -> None:
    answers = gloo.run(run_auto, ranks=2, args=({"max_grad_norm": 1e9},))
    assert answers[0][0] == answers[1][0]
    assert (Plan.from_json(answers[0][0]).costs.norm or 0.0) > 0
    for _, state in answers:
        near(state, train_alone(make_model(), [(X, Y)] * 2, sgd).state)


def test_activations_may_wait_on_the_host_where_its_link_was_measured() -> None:
    """Where nothing may run again. On a CPU, whose memory is the host's, none is measured."""
    assert host_bandwidth(torch.device("cpu"), mock.Mock()) is None
    parts = [nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(2)]
    model, x, limit = nn.Sequential(*parts), torch.randn(512, WIDTH), 2.4e5  # both ranks want 501,312
    options = {"schedule": "auto", "mesh": {"pipe": 2}, "num_microbatches": 8, "trials": 0}
    with (
        PipelineModule(model, loss_fn=F.mse_loss, **records(**options)) as pipe,
        mock.patch("stagewright.pipe.auto.layout.PROFILE_SECONDS", 0.2),
        mock.patch("stagewright.pipe.auto.layout.device_memory", return_value=limit),
        mock.patch("stagewright.pipe.auto.layout.host_bandwidth", return_value=1e15),
    ):
        plan = pipe._building._auto.plan(pipe._given((x, x), {}), schedules=("gpipe",), recompute=("none", "offload"))
    assert "offload" in [stage.recompute for stage in plan.stages]
    assert max(plan.memory_bytes.values()) <= limit
    with PipelineModule(model, schedule=plan, loss_fn=F.mse_loss, example_inputs=(x,)) as planned:
        planned.forward_backward(x, x)
        assert planned.moved_bytes


def test_nothing_is_known_before_the_first_batch() -> None:
    pipe = make_pipe()
    assert pipe.plan is None
    with pytest.raises(ValueError, match='schedule="auto" is not decided yet: expected a first train_step'):
        pipe.state_dict()
    with pytest.raises(ValueError, match='schedule="auto" with a first batch without a target: its loss is profiled'):
        pipe.predict(X)
    pipe.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_chunks": 2},
            'num_chunks= together with schedule="auto": expected only one of them, since the plan decides it',
        ),
        ({"cut": ["1"]}, 'cut= together with schedule="auto"'),
        ({"recompute": "full"}, 'recompute= together with schedule="auto"'),
        (
            {"mesh": {"pipe": 1, "data": 2}, "replan": "batch"},
            r'mesh=\{"data": 2\} with replan="batch": .* expected "data": 1',
        ),
        ({"search": "jointly"}, "search='jointly'"),
        ({"search": "joint", "replan": "batch"}, "expected one of them"),
        ({"seconds": 0}, "seconds=0"),
    ],
)
def test_what_the_plan_decides_on_is_not_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pipe(**options)


def test_a_bad_batch_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match="input 0 is str: expected a tensor with the batch in dimension 0"):
        make_pipe().train_step("text", Y)
    with pytest.raises(ValueError, match="a batch of 8 samples for 9 microbatches"):
        make_pipe(num_microbatches=9).train_step(X, Y)


def _differ() -> list[str]:
    """The errors of ranks that want different numbers of microbatches, of trials, and pass batches of other sizes."""
    rank = torch.distributed.get_rank()
    others = ({"num_microbatches": 2 + rank}, 8), ({"trials": rank}, 8), ({}, 8 - 4 * rank)
    return [refusal(lambda own=own, n=n: make_pipe(**own).train_step(X[:n], Y[:n])) for own, n in others]


def test_ranks_that_differ_are_told_before_anything_is_measured(gloo: Pool) -> None:
    for rank, (microbatches, tries, batches) in enumerate(gloo.run(_differ, ranks=2)):
        assert "expected the same model, schedule, options and batch sizes" in microbatches
        assert f"rank {rank} has schedule 'auto' for 2 ranks, M={2 + rank}, a batch of ((8, 6) torch" in microbatches
        assert f"rank {1 - rank} has schedule 'auto' for 2 ranks, M=as planned" in tries
        assert f"trials={1 - rank}" in tries
        assert f"a batch of (({8 - 4 * rank}, 6) torch.float64)" in batches


def _fails_on_one_rank() -> list[tuple[str, str]]:
    """Kind and text of what is raised here where the loss raises on rank 1."""
    rank, found = torch.distributed.get_rank(), []
    for error in (ValueError("no loss here"), KeyError("weight"), KeyboardInterrupt("by hand")):

        def loss_fn(output: Tensor, target: Tensor, error: BaseException = error) -> Tensor:
            if rank == 1:
                raise error
            return F.mse_loss(output, target)

        with pytest.raises((ValueError, KeyboardInterrupt, PeerLost)) as told:
            make_pipe(loss_fn=loss_fn).train_step(X, Y)
        assert rank == 0 or error in (told.value, told.value.__cause__)
        found.append((told.typename, str(told.value)))
    return found


def test_a_failure_on_one_rank_is_told_on_all(gloo: Pool) -> None:
    first, second = gloo.run(_fails_on_one_rank, ranks=2)
    assert (
        first[:2]
        == second[:2]
        == [
            ("ValueError", "profiling the model failed on rank 1: no loss here"),
            ("ValueError", "profiling the model failed on rank 1: KeyError: 'weight'"),
        ]
    )
    assert second[2] == ("KeyboardInterrupt", "by hand")
    assert first[2][0] == "PeerLost"
    assert first[2][1].endswith("cause: rank 1 failed: KeyboardInterrupt: by hand")


def test_the_median_of_several_ranks() -> None:
    def profile(seconds: float) -> Profile:
        node = Node(name="a", forward_seconds=seconds, backward_seconds=2 * seconds)
        return Profile(nodes=[node], step_seconds=seconds, action_seconds=seconds / 4)

    merged = median_profile([profile(1.0), profile(5.0), profile(2.0)])
    assert merged.nodes[0] == replace(profile(2.0).nodes[0])
    assert (merged.step_seconds, merged.action_seconds) == (2.0, 0.5)


def test_a_plan_is_of_the_hosts_that_are_as_fast_as_the_first() -> None:
    """Ranks of one host are medians together; a third host is as fast as the first."""

    def profile(seconds: float) -> Profile:
        return Profile(nodes=[Node(name="a", forward_seconds=seconds, backward_seconds=seconds)])

    pipe = make_pipe()
    auto = pipe._building._auto
    ranks = [("a", 1.0), ("a", 1.04), ("b", 3.0), ("b", 3.2), ("c", 1.02), ("c", 1.03)]
    found = auto._typical([(host, profile(seconds)) for host, seconds in ranks])
    assert found.parts_seconds == pytest.approx(2 * 1.025)
    assert [each.parts_seconds for each in auto._hosts] == pytest.approx([2.04, 6.2, 2.05])
    pipe.close()


def test_a_smaller_microbatch_that_something_ran_beside_is_measured_again() -> None:
    """It seemed to take longer than a larger one; the planner then refused the profiles of a busy machine."""
    measured: list[int] = []

    def plan(slow: tuple[int, ...]) -> Plan:
        measured.clear()

        def profiled(_: nn.Module, inputs: Any, **__: Any) -> Profile:
            measured.append(inputs.num_samples)
            seconds = 1.0 if len(measured) in slow else 0.001 * inputs.num_samples
            costs = {"forward_seconds": seconds, "backward_seconds": 2 * seconds}
            return Profile(
                nodes=[Node(name=str(n), parameter_bytes=8 * WIDTH * (WIDTH + 1), **costs) for n in range(5)]
            )

        with mock.patch("stagewright.pipe.auto.layout.profile_model", profiled):
            pipe = make_pipe(mesh={"pipe": 2})
            pipe.build(X, Y)
            return pipe.plan

    quiet = plan(())
    assert measured == [2, 1]
    assert plan((2,)).seconds(Op.F) == quiet.seconds(Op.F)
    assert measured == [2, 1, 1]
    never_quiet = plan((2, 3))
    assert measured == [2, 1, 1]
    assert never_quiet.seconds(Op.F) == pytest.approx(quiet.seconds(Op.F))


LOG = logging.getLogger("stagewright")
SILENT = "stagewright.pipe.telling.SILENT_SECONDS"


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Nothing is slow here, however busy the machine is."""
    with mock.patch(SILENT, 1e6):
        yield


def planned(**options: object) -> Plan:
    with profiled():
        pipe = trials.make_pipe(num_microbatches=4, **options)
        pipe.build(*make_batch())
        plan = pipe.plan
        pipe.close()
    return plan


def test_a_line_a_phase_unless_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(LOG, "hasHandlers", return_value=False):
        planned(trials=1)
        lines = capfd.readouterr().err.splitlines()
        begins = ['schedule="auto": ', "profile: ", "links: ", "search: ", "trial 1 of 1: ", "plan, found in "]
        assert [line.startswith(begin) for line, begin in zip(lines, begins, strict=False)] == [True] * 6
        assert " a batch, measured (predicted " in lines[4]
        assert " a batch, measured (predicted " in lines[6]  # the same figure
        assert lines[-1].endswith('Path("plan.json").write_text(pipe.plan.to_json()), then schedule="plan.json"')
        assert lines[4].split(" a batch")[0].split()[-2:] == lines[6].split(" a batch")[0].split()[-2:]
        with mock.patch.object(LOG, "level", logging.WARNING):
            planned(trials=0)
        tell("from another rank", rank=1)
        assert capfd.readouterr().err == ""


def test_a_script_without_a_launcher_and_mesh_is_told_that_one_rank_runs_all(capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with mock.patch.object(LOG, "hasHandlers", return_value=False):
        tell_of_one_rank.cache_clear()
        for ranks in (1, 2):
            PipelineModule(model, mesh={"pipe": ranks})
        assert capfd.readouterr().err == ""
        for _ in range(2):
            PipelineModule(model)
        assert capfd.readouterr().err.count('Write PipelineModule(..., mesh={"pipe": 4})') == 1
        tell_of_late_loss.cache_clear()
        for _ in range(2):
            tell_of_late_loss("2bw", rank=0)
        tell_of_late_loss("2bw", rank=1)
        assert capfd.readouterr().err.count("result.loss is None on rank 0 so far, since batches overlap") == 1


def test_what_takes_long_is_told_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """Waits for two lines, since a busy machine may need long for them; then nobody goes on counting."""
    with caplog.at_level(logging.INFO, logger="stagewright"), mock.patch(SILENT, 0.001):
        with told_if_slow("rank 1's own", rank=1), told_if_slow("building", rank=0):
            while len(caplog.messages) < 2:
                time.sleep(0.001)
        told = len(caplog.messages)
        time.sleep(0.02)
    assert len(caplog.messages) == told
    assert all(text.startswith("building: ") and text.endswith(" so far") for text in caplog.messages)


def test_one_plan_alone_is_not_tried() -> None:
    """Nothing is to be decided; trials=1 asks for it."""
    plan = planned(mesh={"pipe": 1})
    assert "not tried: no other plan comes within 5% of it, more than the profile can be off" in plan.notes


def test_handlers_are_told_and_no_trial_is_announced_that_one_process_cannot_make(caplog: Any, capfd: Any) -> None:
    with caplog.at_level(logging.INFO, logger="stagewright"):
        plan = planned(mesh={"pipe": 2}, trials=1)
    assert any(text.startswith("links: ") for text in caplog.messages)
    assert capfd.readouterr().err == ""
    assert plan.notes[-1] == "not tried: all ranks are in one process, where they take turns"
    assert not any("trial 1" in text or "1 trial" in text for text in caplog.messages)


def test_what_is_idle_is_said() -> None:
    plan = replace(planned(trials=0), num_devices=4)
    assert "  3 of 4 processes idle: your batch of 2 samples is too small" in outline(plan, plan, num_samples=2)
    assert any("a larger batch" in line for line in outline(plan, plan, num_samples=8))


@pytest.mark.parametrize(("mesh", "replicas"), [({"pipe": 2}, (1, 1)), ({"pipe": 1, "data": 2}, (2,))])
def test_the_axes_of_a_mesh_stay(mesh: dict[str, int], replicas: tuple[int, ...]) -> None:
    plan = planned(trials=0, mesh=mesh)
    assert plan.replicas[: len(plan.stages) // plan.num_chunks] == replicas


def test_sizes_between_and_beyond_the_measured_ones() -> None:
    def profile(samples: int) -> Profile:
        node = Node(
            name="a", forward_seconds=1 + 2.0 * samples, backward_seconds=3.0 * samples, stash_bytes=8.0 * samples,
            parameter_bytes=7.0, update_seconds=5.0,
        )  # fmt: skip
        return Profile(nodes=[node], microbatch_size=samples, step_seconds=1 + 5.0 * samples)

    measured = {size: profile(size) for size in (4, 1)}
    assert at_size(measured, 4) is measured[4]
    for size in (2, 8):
        found, wanted = at_size(measured, size), profile(size)
        assert found.microbatch_size == size
        assert found.step_seconds == pytest.approx(wanted.step_seconds)
        for name in ("forward_seconds", "backward_seconds", "stash_bytes", "parameter_bytes", "update_seconds"):
            assert getattr(found.nodes[0], name) == pytest.approx(getattr(wanted.nodes[0], name))
        assert found.nodes[0].input_grad_seconds == 0.0  # not measured
