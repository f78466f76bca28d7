"""Batches that come microbatch by microbatch, of unequal length: the numbers of one process that accumulates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pool import Pool
from support.unequal import BATCHES, WORDS, alone, assert_alone, make_model, make_pipe
from torch import Tensor


def trained(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor]]:
    pipe = make_pipe(**options)
    losses = [pipe.train_step(microbatches=batch).loss for batch in BATCHES]
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zb"])
def test_training_is_that_of_one_process(schedule: str) -> None:
    assert_alone(trained({"schedule": schedule, "mesh": {"pipe": 2}}))


def test_training_over_processes(gloo: Pool) -> None:
    for found in gloo.run(trained, ranks=2, args=({},)):
        assert_alone(found)


def test_evaluation_verification_and_a_dict_of_a_loader() -> None:
    pipe = make_pipe(mesh={"pipe": 2}, verify=True)
    batch = BATCHES[0]
    outputs = pipe.eval_step(microbatches=batch).output
    model = make_model()
    for (words, _), output in zip(batch, outputs, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(output, model(words), rtol=0, atol=1e-13)
    assert len(pipe.predict(microbatches=[words for words, _ in batch])) == len(batch)  # type: ignore[arg-type]
    loss = pipe.train_step({"microbatches": [list(each) for each in batch]}).loss  # verified
    assert loss == pytest.approx(alone()[0][0], rel=1e-13)
    same = [(x[:, :2], y[:, :2]) for x, y in batch]  # equal lengths are joined, as ever
    assert pipe.eval_step(microbatches=same).output.shape == (6, 2, WORDS)  # type: ignore[attr-defined]
    pipe.train_step(torch.ones(5, 4, dtype=torch.long), torch.ones(5, 4, dtype=torch.long))  # a whole one
    pipe.close()


@pytest.mark.thorough(
    but=[
        "call1-expected a list of microbatches",
        "call2-a batch of 3 microbatches for a schedule of 4: expected 4 in every batch, or",
        "call3-microbatches= together with target: expected it alone",
        "call4-microbatch 3 is int: expected a tuple of what train_step takes",
    ]
)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"microbatches": []}, r"microbatches=\[\]: expected a list of microbatches, each a tuple"),
        ({"microbatches": torch.ones(2)}, r"expected a list of microbatches"),
        (
            {"microbatches": BATCHES[0][:3]},
            "a batch of 3 microbatches for a schedule of 4: expected 4 in every batch, or",
        ),
        ({"microbatches": BATCHES[0], "target": 1}, "microbatches= together with target: expected it alone"),
        ({"microbatches": [*BATCHES[0][:3], 5]}, "microbatch 3 is int: expected a tuple of what train_step takes"),
        ({"microbatches": [*BATCHES[0][:3], (torch.ones(()),) * 2]}, "microbatch 3: input 0 is a tensor without"),
        (
            {"microbatches": [*BATCHES[0][:3], (torch.ones(2, 2),) * 2]},
            "is torch.float32 and the stages were built for",
        ),
        ({"microbatches": [*BATCHES[0][:3], {"words": 1}]}, "microbatch 3: no target among 'words'"),
    ],
)
def test_what_is_no_batch_of_microbatches(call: dict[str, Any], message: str) -> None:
    pipe = make_pipe(mesh={"pipe": 2})
    pipe.build(microbatches=BATCHES[0])
    with pytest.raises(ValueError, match=message):
        pipe.train_step(**call)
    pipe.close()
