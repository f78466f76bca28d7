"""replan="batch": each batch of unequal microbatches runs in an order of its own, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.inside import AutoLayout, BatchOrders, Given, find_traces, peak_held, read_traces
from support.pool import CaseError, Pool
from support.unequal import BATCHES, alone, assert_alone, make_batch, make_pipe
from torch import Tensor

from stagewright import PipelineModule
from stagewright.partition import Node, Profile
from stagewright.pipe import StepRecord
from stagewright.schedules import check

Programs = tuple[tuple[str, ...], ...]


@contextmanager
def measured() -> Iterator[None]:
    """Profiles by formula, so that each run has the same plan: 1 ms and 1 kB a token, and attention."""

    def profile(auto: AutoLayout, first: Given, seconds: float) -> Profile:
        del seconds
        tokens, length = first.arguments.tensors[0].numel(), first.arguments.tensors[0].shape[1]
        seconds = 1e-3 * tokens * (1 + 0.02 * length)
        nodes = [
            Node(
                name=str(number),
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                input_grad_seconds=seconds,
                weight_grad_seconds=seconds,
                stash_bytes=1e3 * tokens,
                activation_bytes=64.0 * tokens,
                parameter_bytes=8.0 * sum(p.numel() for p in unit.parameters()),
            )
            for number, unit in enumerate(auto._model.children())
        ]
        return Profile(nodes=tuple(nodes), microbatch_size=first.arguments.num_samples)

    with mock.patch.object(AutoLayout, "_profile", profile):
        yield


def make(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"schedule": "auto", "replan": "batch", "mesh": {"pipe": 2}, "num_microbatches": None}
    return make_pipe(**(settings | options))


def programs(pipe_or_timeline: Any) -> Programs:
    return tuple(tuple(map(str, program)) for program in pipe_or_timeline.schedule.programs)


def run(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor], list[Programs]]:
    with measured():
        pipe = make(**options)
        results = [pipe.train_step(microbatches=batch) for batch in BATCHES]
        orders = [programs(result.timeline()) for result in results]  # the oldest is asked for last of all
        state = pipe.full_state_dict()
        pipe.close()
    return [result.loss for result in results], state, orders


def test_each_batch_runs_in_an_order_of_its_own_with_the_numbers_of_one_process(tmp_path: Path) -> None:
    records: list[StepRecord] = []
    with measured():
        pipe = make(on_step=records.append)
        results, seen = [], []
        with mock.patch.object(BatchOrders, "find", autospec=True, side_effect=BatchOrders.find) as find:
            pipe.build(microbatches=BATCHES[0])
            tracer = pipe.tracer(tmp_path, every=1)
            for batch in [*BATCHES, BATCHES[0]]:
                results.append(pipe.train_step(microbatches=batch))
                seen.append(tracer.step())
            tracer.close()
            problems = [call.args[1] for call in find.call_args_list]
    losses, state = alone(4)
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(pipe.full_state_dict()[name], value, rtol=0, atol=1e-12)
    timelines = [result.timeline() for result in results]
    orders = [programs(timeline) for timeline in timelines]
    assert orders[0] == orders[3]
    assert len(set(orders)) == 3
    assert programs(pipe) not in orders
    assert len(problems) == 3  # what came before is known
    for problem, timeline in zip(problems, timelines, strict=False):
        check(timeline.schedule)
        assert problem.memory_limit is not None
        for limit, program in zip(problem.memory_limit, timeline.schedule.programs, strict=True):
            held = peak_held(program, problem.held)
            assert held <= limit * (1 + 1e-9)
        ran = [[str(span.what) for span in rank.compute if span.what.op.value != "U"] for rank in timeline.ranks]
        assert ran == [list(map(str, program)) for program in timeline.schedule.programs]
    assert [record.replan_seconds > 0 for record in records] == [True] * 4
    (step,) = read_traces(find_traces([tmp_path])).steps
    assert step.number == 3
    assert programs(step.timeline) == orders[3]
    pipe.close()


@pytest.mark.thorough
def test_ranks_run_the_same_orders(gloo: Pool) -> None:
    one, other = gloo.run(run, ranks=2, args=({"mesh": {"pipe": 2}},))
    assert one[2] == other[2]
    assert len(set(one[2])) == 3
    for losses, state, _ in (one, other):
        assert_alone((losses, state), atol=1e-12)


def _other_lengths() -> None:
    rank = dist.get_rank()
    with measured():
        pipe = make()
        pipe.train_step(microbatches=BATCHES[0])
        pipe.train_step(microbatches=make_batch(0, (3, 9, 4, 7 + rank)))


@pytest.mark.thorough
def test_ranks_that_pass_other_lengths_are_told(gloo: Pool) -> None:
    with pytest.raises(CaseError, match=r"rank 1 passed microbatches of 1 x 3, 2 x 9, 1 x 4, 2 x 8 elements to step 1"):
        gloo.run(_other_lengths, ranks=2)


@pytest.mark.thorough
def test_a_microbatch_that_no_device_has_room_for_and_the_batch_behind_it() -> None:
    with measured(), mock.patch("stagewright.pipe.auto.layout.device_memory", return_value=80e3):
        pipe = make()
        pipe.train_step(microbatches=BATCHES[0])
        long = make_batch(0, (3, 9, 4, 40))
        message = r"no schedule for the batch of step 1: memory_limit=.*one microbatch alone"
        with pytest.raises(ValueError, match=message):
            pipe.train_step(microbatches=long)
        pipe.train_step(microbatches=BATCHES[1])
        assert pipe.num_steps == 2
        pipe.close()


def test_batches_that_do_not_go_together() -> None:
    with measured():
        pipe = make()
        with pytest.raises(ValueError, match=r"with a first batch that is not cut: expected train_step\(microbatches"):
            pipe.train_step(torch.zeros(4, 4, dtype=torch.long), torch.zeros(4, 4, dtype=torch.long))
        pipe.train_step(microbatches=BATCHES[0])
        with pytest.raises(ValueError, match="a batch of 3 microbatches for a schedule of 4"):
            pipe.train_step(microbatches=BATCHES[0][:3])
        pipe.train_step(torch.zeros(6, 4, dtype=torch.long), torch.zeros(6, 4, dtype=torch.long))  # cut as ever
        pipe.close()
