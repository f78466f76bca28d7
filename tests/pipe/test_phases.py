"""What schedule="auto" says, the axes that it keeps, and costs of microbatches that it did not measure."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.inside import at_size, outline, tell, tell_of_late_loss, tell_of_one_rank, told_if_slow
from support.trials import make_batch, make_pipe, profiled

from stagewright.partition import Node, Plan, Profile
from stagewright.pipe import PipelineModule

LOG = logging.getLogger("stagewright")
SILENT = "stagewright.pipe.telling.SILENT_SECONDS"


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """Nothing is slow here, however busy the machine is."""
    with mock.patch(SILENT, 1e6):
        yield


def planned(**options: object) -> Plan:
    with profiled():
        pipe = make_pipe(num_microbatches=4, **options)
        pipe.build(*make_batch())
        plan = pipe.plan
        pipe.close()
    assert plan is not None
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


def test_handlers_are_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="stagewright"):
        planned(trials=0)
    assert any(text.startswith("search: ") or text.startswith("links: ") for text in caplog.messages)
    assert capfd.readouterr().err == ""


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


def test_no_trial_is_announced_that_one_process_cannot_make(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="stagewright"):
        plan = planned(mesh={"pipe": 2}, trials=1)
    assert plan.notes[-1] == "not tried: all ranks are in one process, where they take turns"
    assert not any("trial 1" in text or "1 trial" in text for text in caplog.messages)


def test_what_is_idle_is_said() -> None:
    plan = replace(planned(trials=0), num_devices=4)
    assert "  3 of 4 processes idle: your batch of 2 samples is too small" in outline(plan, plan, num_samples=2)
    assert any("a larger batch" in line for line in outline(plan, plan, num_samples=8))


@pytest.mark.thorough(but=["mesh1-replicas1"])
@pytest.mark.parametrize(("mesh", "replicas"), [({"pipe": 2}, (1, 1)), ({"pipe": 1, "data": 2}, (2,))])
def test_the_axes_of_a_mesh_stay(mesh: dict[str, int], replicas: tuple[int, ...]) -> None:
    plan = planned(trials=0, mesh=mesh)
    assert plan.replicas[: len(plan.stages) // plan.num_chunks] == replicas


def test_replicas_do_not_go_with_an_order_for_each_batch() -> None:
    with pytest.raises(ValueError, match=r'mesh=\{"data": 2\} with replan="batch": .* expected "data": 1'):
        make_pipe(mesh={"pipe": 1, "data": 2}, replan="batch")


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
