"""Forms: structured values taken apart into flat tensors and put together again."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from support.inside import Arguments, Form, FormError, first_run, given_stages, model_units
from torch import Tensor, nn

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)
Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Plain:
    logits: Any
    extra: Any = None
    scale: InitVar[float] = 1.0
    number: int = field(init=False, default=7)


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Cache:
    """Neither tensor nor constant."""


@pytest.mark.parametrize(
    "value",
    [
        A,
        (A, [B, {"c": C, "none": None}]),
        OrderedDict(b=A, a=(1, 2.5, True, "text", Mode.FAST, torch.float64, B)),
        Point(A, [B, Point(C, None)]),
        [Plain(A, Frozen((B, {"k": Plain(C)})))],
        (),
        {"only": 3},
    ],
)
def test_values_are_put_together_as_they_were(value: object) -> None:
    form, flat = Form.of(value)
    assert all(isinstance(x, Tensor) for x in flat)
    assert len(flat) == form.num_tensors == len(form.paths)
    assert repr(form.assemble(flat)) == repr(value)
    again, same = Form.of(form.assemble(flat))
    assert again == form
    assert hash(again) == hash(form)
    assert all(one is other for one, other in zip(flat, same, strict=True))


def test_a_dataclass_keeps_what_its_init_does_not_take() -> None:
    made = Plain(A, scale=3.0)
    made.number = 9
    form, flat = Form.of({"out": made})
    back = form.assemble(flat)["out"]
    assert (type(back), back.number, back.logits) == (Plain, 9, A)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((A, 1), (A, True)),
        ((A, 1), (A, 1.0)),
        ((A, 0.0), (A, -0.0)),
        ((A, None), (A, B)),
        ((A, B), [A, B]),
        ({"x": A}, {"y": A}),
        (Plain(A), Frozen(A)),
        (Plain(A), Plain(A, 1)),
    ],
)
def test_forms_tell_values_apart(one: object, other: object) -> None:
    assert Form.of(one)[0] != Form.of(other)[0]


def test_forms_are_equal_where_tensors_alone_differ() -> None:
    nan = float("nan")
    assert Form.of((A, nan, {"x": B}))[0] == Form.of((C, float("nan"), {"x": A}))[0]


def test_what_is_neither_is_refused_by_name_or_pruned() -> None:
    value = {"logits": A, "cache": Plain((B, Cache()))}
    with pytest.raises(FormError, match=r"\['cache'\].logits\[1\] is Cache: expected tensors, numbers"):
        Form.of(value)
    form, flat = Form.of_output(value)
    assert repr(form.assemble(flat)) == repr({"logits": A, "cache": Plain((B, None))})


def test_arguments_have_names() -> None:
    arguments = Arguments.of((A, (B, 3)), {"z": {"k": C}, "flag": True, "a": Plain(A)})
    assert arguments.names == ("input 0", "input 1[0]", "a.logits", "z['k']")
    assert arguments == Arguments.of((A, (B, 3)), {"a": Plain(A), "flag": True, "z": {"k": C}})
    assert arguments.call(lambda *args, **kwargs: (len(args), sorted(kwargs))) == (2, ["a", "flag", "z"])
    with pytest.raises(ValueError, match=r"^past\[0\] is Cache: expected tensors"):
        Arguments.of((A,), {"past": [Cache()]})
    with pytest.raises(ValueError, match=r"^input 1 is Cache: expected tensors"):
        Arguments.of((A, Cache()))


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, batch: Any, *, double: bool = False, shift: Any = None) -> Any:
        h = self.a(batch["x"]) * (2 if double else 1)
        out = self.b(h) + (0 if shift is None else shift.x)
        return Plain({"out": out, "cache": Cache()}, extra=(3, None, h))


def run(model: nn.Module, arguments: Arguments) -> Any:
    """Cut into one stage, and run."""
    cut = model_units(model, arguments, enter_unit=None).evenly(1)
    linked = cut.pieces[0].link(None, index=0, inputs=arguments.form)
    stage, flat, _ = first_run(cut.pieces[0], linked, arguments.tensors)
    return cut.form_of_output(stage).assemble(flat)


@pytest.mark.parametrize("kwargs", [{}, {"double": True}, {"shift": Point(torch.ones(2, 3), "text")}])
def test_a_recorded_model_takes_and_returns_structured_values(kwargs: dict[str, Any]) -> None:
    model = Structured()
    arguments = Arguments.of(({"x": torch.randn(2, 3), "unused": None},), kwargs)
    found, expected = run(model, arguments), arguments.call(model)
    assert isinstance(found, Plain)
    assert torch.equal(found.logits["out"], expected.logits["out"])
    assert found.logits["cache"] is None
    assert found.extra[:2] == (3, None)
    assert torch.equal(found.extra[2], expected.extra[2])


def test_transformers_outputs() -> None:
    pytest.importorskip("transformers")
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    made = CausalLMOutputWithPast(logits=A, past_key_values=DynamicCache(), hidden_states=(B, C))
    form, flat = Form.of_output(made)
    back = form.assemble(flat)
    assert isinstance(back, CausalLMOutputWithPast)
    assert (back.logits, back.past_key_values, back.hidden_states) == (A, None, (B, C))


@pytest.mark.parametrize("given", [False, True])
def test_a_chain_refuses_keywords(given: bool) -> None:
    arguments = Arguments.of((), {"x": torch.randn(2, 3)})
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    cut = given_stages(modules, arguments, device=torch.device("cpu"), enter_unit=None) if given else None
    cut = cut or model_units(nn.Sequential(*modules), arguments, enter_unit=None).evenly(2)
    with pytest.raises(ValueError, match=r"x by keyword for .*: expected positional arguments, in the order of Linear"):
        cut.pieces[0].link(None, index=0, inputs=arguments.form)
