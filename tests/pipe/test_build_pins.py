"""Building a pipeline, whatever its code looks like: which mistake is told first, what processes do together.

pytest tests/pipe/test_build_pins.py --update-golden      writes data/pins/collectives.json anew
"""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import tensor_models
from support.inside import Options, arguments, read_options
from support.pool import Pool
from support.records import records
from support.small import X, Y, layers, make
from torch import nn

from stagewright.comm import Collectives
from stagewright.pipe import PipelineModule

PINNED = Path(__file__).parents[1] / "data" / "pins" / "collectives.json"

# Mistakes that are told by the first of them: each stands in front of all below it.
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("expected a model, or a list", {"model": None}),
    ("cut='3'", {"split_points": "3"}),
    ("loss_fn='mine'", {"loss_fn": "mine"}),
    ("loss_weight='labels' without loss_fn", {"loss_weight": "labels"}),
    ("batch_dims=3", {"batch_dims": 3}),
    ("correction='none'", {"delay_correction": "none"}),
    ("grad_scaler=", {"grad_scaler": 3}),
    ("device='none'", {"device": "none"}),
    ("dims=3", {"sequence_dims": 3}),
    ("lengths=3", {"slice_lengths": 3}),
    ("compile=3", {"compile": 3}),
    ("post_validation=1", {"post_validation": 1}),
    ("timeout=0", {"timeout": 0}),
    ("max_grad_norm=True", {"max_grad_norm": True}),
    ("flush_first=-1", {"flush_first": -1}),
    ("seed=None", {"seed": None}),
    ("optimizer=3", {"optimizer": 3}),
    ("lr_scheduler=3", {"lr_scheduler": 3}),
    ("on_step=3", {"on_step": 3}),
    ("trials=-1", {"trials": -1}),
    ("verify=0", {"verify": 0}),
    ("example_inputs= is int", {"example_inputs": 3}),
    ("sends='none'", {"tensor_sends": "none"}),
    ("replan='epoch'", {"replan": "epoch"}),
    ("data_parallel='zero9'", {"data_parallel": "zero9"}),
    ("unknown schedule '1f2b'", {"schedule": "1f2b"}),
    ("mesh axis 'dp'", {"mesh": {"dp": 2}}),
    ("recompute='half'", {"recompute": "half"}),
]


@pytest.mark.parametrize("pair", list(pairwise(MISTAKES)), ids=lambda pair: pair[0][0])
def test_of_two_mistakes_the_first_one_is_told(pair: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    (first, one), (second, other) = pair
    told = [first] if set(one) & set(other) else [first, second]
    for text, options in zip(told, [other | one, other], strict=False):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            make(**({"model": layers()} | options))


class Read(dict[str, Any]):
    """Options that note which of them were asked for."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def test_no_option_of_the_constructor_is_forgotten() -> None:
    names = dict(inspect.signature(PipelineModule).parameters)
    defaults = {name: parameter.default for name, parameter in names.items() if name != "old"}
    options = Read(arguments.read_arguments(defaults | {"model": layers()}, {}))
    read_options(options)
    made = {"calls", "compress", "example"}  # of several, or under another name
    assert options.asked | {field.name for field in fields(Options)} == {*options, *made}


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return tensor_models.Model()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


TOKENS = torch.arange(48).reshape(8, 6) % tensor_models.WORDS


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


RUNS: dict[str, dict[str, Any]] = {
    "data replicas, clipped": {"mesh": {"pipe": 2, "data": 2}, "max_grad_norm": 1.0},
    "zero-bubble with fsdp": {"mesh": {"pipe": 2, "data": 2}, "schedule": "zb-h1", "data_parallel": "fsdp"},
    "a stream with zero1": {
        "mesh": {"pipe": 2, "data": 2},
        "schedule": "2bw",
        "data_parallel": "zero1",
        "num_microbatches": 4,
    },
    "tensor groups, tied, verified": {
        "mesh": {"pipe": 2, "tensor": 2},
        "tensor_parallel": "auto",
        "tensor_sends": "parts",
        "verify": True,
    },
    "chunks, later updates": {
        "mesh": {"pipe": 4},
        "schedule": "interleaved",
        "post_validation": True,
        "max_grad_norm": 1.0,
    },
    "no loss": {"mesh": {"pipe": 4}, "loss_fn": None, "optimizer": None},
}


def together(name: str) -> list[str]:
    """What this process does with others in a run, from the constructor to the end: what, with whom."""
    warnings.simplefilter("ignore")
    done: list[str] = []
    run, make_group = Collectives._run, dist.new_group

    def recorded_run(self: Any, collective: Any, processes: Any, what: str) -> Any:
        done.append(f"{what} {list(processes)}")
        return run(self, collective, processes, what)

    def recorded_group(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        done.append(f"new group {None if ranks is None else list(ranks)}")
        return make_group(ranks, *arguments, **options)

    Collectives._run, dist.new_group = recorded_run, recorded_group  # type: ignore[method-assign]
    try:
        options = RUNS[name]
        tokens, has_loss = options["mesh"].get("tensor", 1) > 1, options.get("loss_fn", 1) is not None
        torch.manual_seed(0)
        given: dict[str, Any] = {"optimizer": adam, "loss_fn": cross_entropy if tokens else F.mse_loss}
        model = language_model() if tokens else layers(8)
        pipe = PipelineModule(model, **records(**(given | {"num_microbatches": 4} | options)))
        batch = (TOKENS, TOKENS) if tokens else (X, Y)
        done.append("built:")
        pipe.build(*batch[: 1 + has_loss])
        done.append("run:")
        for _ in range(2 if has_loss else 0):
            pipe.train_step(*batch)
        pipe.predict(batch[0])
        pipe.full_state_dict()
        pipe.close()
    finally:
        Collectives._run, dist.new_group = run, make_group  # type: ignore[method-assign]
    return done


@pytest.mark.gloo
@pytest.mark.parametrize("name", RUNS)
def test_what_processes_do_together_stays_the_same(gloo: Pool, name: str, update_golden: bool) -> None:
    by_rank = gloo.run(together, ranks=4, args=(name,))
    found = {str(rank): by_rank[rank] for rank in (0, 3)}
    pinned = json.loads(PINNED.read_text())
    if update_golden:
        PINNED.write_text(json.dumps(pinned | {name: found}, indent=0) + os.linesep)
    else:
        assert found == pinned[name]
