"""Building a pipeline, whatever its code looks like: which mistake is told first, and that no option is forgotten."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import GivenOptions, read_options
from support.small import layers, make

from stagewright.pipe import PipelineModule

# Mistakes that are told by the first of them: each stands in front of all below it.
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("expected a model, or a list", {"model": None}),
    ("cut='3'", {"cut": "3"}),
    ("loss_fn='mine'", {"loss_fn": "mine"}),
    ("loss_weight='labels' without loss_fn", {"loss_weight": "labels"}),
    ("batch_dims=3", {"batch_dims": 3}),
    ("correction='none'", {"correction": "none"}),
    ("grad_scaler=", {"grad_scaler": 3}),
    ("device='none'", {"device": "none"}),
    ("dims=3", {"dims": 3}),
    ("lengths=3", {"lengths": 3}),
    ("compile=3", {"compile": 3}),
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
    ("sends='none'", {"sends": "none"}),
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


def test_no_argument_of_the_constructor_is_forgotten() -> None:
    signature = inspect.signature(PipelineModule).parameters
    defaults = {name: parameter.default for name, parameter in signature.items() if name != "unknown"}
    assert [*defaults] == [field.name for field in fields(GivenOptions)]
    given = SimpleNamespace(**defaults | {"model": layers()})
    asked = set[str]()

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(given, name)

    read_options(Asked(), {})  # type: ignore[arg-type]
    assert asked == {*defaults}
