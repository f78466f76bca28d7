"""Agreement with the reference: a last bit, and a gradient that no rank has, are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.cases import Case, Outcome, agree
from support.reference import reference


def test_agreement_sees_the_last_bit() -> None:
    case = Case(task="mlp", num_microbatches=2)
    outcome = reference.__wrapped__(case)
    gradient = outcome.last_grads["0.weight"]
    gradient[0, 0] = gradient[0, 0].nextafter(torch.tensor(1e9))
    with pytest.raises(AssertionError, match=r"last_grads: 1 of 14 differ .* 0\.weight by"):
        agree(outcome, reference(case), case)


def test_ranks_of_one_run_are_put_together() -> None:
    case = Case(task="mlp", num_microbatches=2)
    whole = reference(case)
    shared: dict[str, Any] = {
        "losses": whole.losses,
        "grad_norms": whole.grad_norms,
        "first_state": whole.first_state,
        "state": whole.state,
        "eval_loss": whole.eval_loss,
    }
    halves = [
        Outcome(**shared, first_grads=dict(first), last_grads=dict(last), eval_output=output)
        for first, last, output in (
            (list(whole.first_grads.items())[:6], list(whole.last_grads.items())[:6], None),
            (list(whole.first_grads.items())[6:], list(whole.last_grads.items())[6:], whole.eval_output),
        )
    ]
    agree(halves, whole, case)
    with pytest.raises(AssertionError, match="on one side only"):
        agree(halves[1:], whole, case)
