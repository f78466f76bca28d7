"""A sample of test_numerics.py over real gloo processes, and what only several processes can show."""

from __future__ import annotations

import pytest
import torch
from support.cases import Case, Layout, agree
from support.matrix import cover, make_case, sample
from support.models import make_batch
from support.pipeline import make_pipeline, run
from support.pool import Pool
from support.reference import copied, reference, reference_model
from torch import Tensor


def check(gloo: Pool, case: Case, layout: Layout) -> None:
    """Agreement includes: the same loss and the same full_state_dict on every rank."""
    agree(gloo.run(run, ranks=layout.num_ranks, args=(case, layout)), reference(case), case)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "layout"), sample(ranks=(2, 3, 4), times=1))
def test_every_model(gloo: Pool, case: Case, layout: Layout) -> None:
    check(gloo, case, layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "layout"), cover(ranks=(2, 3, 4)))
def test_every_model_under_every_schedule(gloo: Pool, case: Case, layout: Layout) -> None:
    check(gloo, case, layout)


# --- what only several processes can show ---


def load_twice(case: Case, layout: Layout, state: dict[str, Tensor]) -> bool:
    """Loads a full, then a local state dict; whether the weights are those of `state` after each."""
    pipe = make_pipeline(case, layout, reference_model(case))
    inputs, target = make_batch(case.task, index=0, size=case.batch_sizes[0])
    pipe.load_state_dict(state)
    local = copied(pipe.state_dict())
    first = all(torch.equal(tensor, state[name]) for name, tensor in pipe.full_state_dict().items())
    pipe.train_step(*inputs, target)
    pipe.load_state_dict(local)
    second = all(torch.equal(tensor, state[name]) for name, tensor in pipe.full_state_dict().items())
    pipe.close()
    return first and second


@pytest.mark.thorough
def test_state_dicts_load_whole_and_by_rank(gloo: Pool) -> None:
    layout = Layout(num_ranks=2)
    case = make_case("tied-gpt", layout, 4)
    assert gloo.run(load_twice, ranks=2, args=(case, layout, reference(case).state)) == [True, True]


def train_as_torchrun_does(case: Case, layout: Layout) -> tuple[int, int, float]:
    """No process group, no mesh, no example inputs: all of it comes from outside and the first call."""
    inputs, target = make_batch(case.task, index=0, size=case.batch_sizes[0])
    pipe = make_pipeline(case, layout, reference_model(case), mesh=None, example_inputs=None)
    loss = pipe.forward_backward(*inputs, target).loss
    position = (pipe.rank, pipe.num_ranks, loss)
    pipe.close()
    return position


def test_the_environment_alone_is_enough(gloo: Pool) -> None:
    layout = Layout(num_ranks=2)
    case = make_case("mlp", layout, 5)
    found = gloo.run(train_as_torchrun_does, ranks=2, args=(case, layout), group=False)
    loss = reference(case).losses[0]
    assert found == [(0, 2, loss), (1, 2, loss)]
