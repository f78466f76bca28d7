"""The test support on its own feet: what the numerics tests rest on must not rest on stagewright."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from support.cases import Case, Outcome, agree
from support.matrix import all_layouts, cover
from support.models import TASKS, make_batch, make_model, seeded_units
from support.pairwise import pairwise
from support.reference import Seeder, mix, reference

TRACED = [name for name, task in TASKS.items() if task.kind == "traced"]


def test_mix_seeds_each_coordinate_apart() -> None:
    assert mix(0, 0, 0, 0) == mix(2**64, 0, 0, 0)
    seeds = {mix(*point) for point in itertools.product(range(6), repeat=4)}
    assert len(seeds) == 6**4
    assert all(0 <= seed < 2**64 for seed in seeds)
    # A coordinate of 0 is one step of splitmix64; from state 0 its published first output.
    assert mix_once(0) == 0xE220A8397B1DCDAF
    assert mix(0, 0, 0, 0) == mix_once(mix_once(mix_once(0)))


def mix_once(state: int) -> int:
    """splitmix64's next output from `state`, as in its reference C code."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


class SeededGraph(fx.Interpreter):
    """An exported graph that seeds the generator itself at the first node of each call of a unit, by its ordinal.

    A unit is the outermost module that was called within the model, torch's containers looked through: export writes
    the calls that a node stands in beside it, a second call of a module under a path of its own.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.entered: list[str] = []  # unit of each call
        self.ordinals: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            unit = self._unit(node)
            if unit is not None and unit not in self.entered[-1:]:
                self.ordinals[node] = len(self.entered)
                self.entered.append(unit)

    def _unit(self, node: fx.Node) -> str | None:
        calls = list(node.meta.get("nn_module_stack", {}).values())[1:]  # the first is that of the model
        return next((path for path, kind in calls if kind != "torch.nn.modules.container.Sequential"), None)

    def run_node(self, n: fx.Node) -> Any:
        if n in self.ordinals:
            torch.default_generator.manual_seed(mix(3, 1, 2, self.ordinals[n]))
        return super().run_node(n)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRACED)
def test_modules_in_the_order_they_run_are_those_of_the_exported_graph(name: str) -> None:
    model = make_model(name)
    example, _ = make_batch(name, index=0, size=5)
    batch, _ = make_batch(name, index=1, size=2)
    dynamic = [{0: torch.export.Dim.AUTO} for _ in example]
    program = torch.export.export(model, example, dynamic_shapes=dynamic)
    graph = SeededGraph(program.module(check_guards=False))
    units = seeded_units(model)
    names = {path for path, module in model.named_modules() if any(module is unit for unit in units)}
    assert {path.partition("@")[0] for path in graph.entered} == names
    seeder = Seeder(units, seed=3)
    seeder.at(step=1, microbatch=2)
    with torch.random.fork_rng(devices=[]):
        expected = _tuple(model(*batch))
        traced = _tuple(graph.run(*batch))
    assert seeder.unit == len(graph.entered)
    assert all(torch.equal(a, b) for a, b in zip(traced, expected, strict=True))


def _tuple(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TASKS)
def test_the_reference_repeats_itself_and_every_parameter_learns(name: str) -> None:
    case = Case(task=name, num_microbatches=5, num_stages=4 if TASKS[name].kind == "stages" else None)
    first, again = reference(case), reference.__wrapped__(case)
    agree(again, first, case)
    moved = {key for key in first.state if not torch.equal(first.state[key], first.first_state[key])}
    assert moved == first.state.keys()
    parameters = {key for key in first.state if "running" not in key and "num_batches" not in key}
    assert first.first_grads.keys() == parameters


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


def test_pairwise_covers_every_pair() -> None:
    factors: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [0, 1], "d": [0, 1]}
    rows = pairwise(factors, allowed=lambda row: row["a"] != row["b"])
    for one, other in itertools.combinations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        wanted = set(itertools.product(factors[one], factors[other]))
        assert met == {(x, y) for x, y in wanted if (one, other) != ("a", "b") or x != y}
    assert len(rows) <= 12


def test_the_matrix_is_as_large_as_the_issue_asks() -> None:
    assert len(all_layouts(ranks=(1, 2, 3, 4))) == 3 * 4 + 2 * 12  # three schedules of one chunk, two of one to three
    names = [parameter.id for parameter in cover(ranks=(2, 3, 4))]
    assert len(names) == len(set(names)) < 60
