"""Trials of plans: what they leave behind (nothing), which plan wins, what cannot be tried, and what fails in one."""

import copy
import random
import re
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import near
from support.inside import Arguments, Given, Options, Trials, auto, named, to_try, trial
from support.inside import simulated_simulated as simulated
from support.pool import Pool
from support.records import records
from support.trials import BATCH, WIDTH, Draws, fails, make_batch, make_loss, make_model, make_pipe, profiled, seen
from torch import Tensor, nn

from stagewright.comm import Collectives, MeshPlace, join_world
from stagewright.partition import Cluster, Node, Plan, Profile, plan
from stagewright.pipe import PipelineModule
from stagewright.schedules import Costs, Op

CPU = torch.device("cpu")


def make_given() -> Given:
    x, y = make_batch()
    return Given(arguments=Arguments.of((x,)), target=y)


def plans(ranks: int = 1, num_layers: int = 4, **options: Any) -> list[Plan]:
    """Plans of microbatches of 4, 2 and 1, by a profile that nobody measured."""
    costs = {"forward_seconds": 1e-4, "backward_seconds": 2e-4, "stash_bytes": 1e3, "parameter_bytes": 432.0}
    nodes = [Node(name=str(i), **costs) for i in range(num_layers)]
    profiles = {size: Profile(nodes=nodes, microbatch_size=size, action_seconds=1e-5) for size in (4, 2, 1)}
    others: list[Plan] = []
    cluster = Cluster.from_levels([(ranks, 1e9)])
    best = plan(profiles, cluster, global_batch=BATCH, runnable=True, on_runners_up=others.extend, **options)
    return [best, *others]


def try_them(model: nn.Module, found: list[Plan], batch: Given | None = None, **options: Any) -> tuple[Plan, Plan]:
    world = join_world(device=CPU, timeout=120.0)
    collectives = Collectives(MeshPlace.line(world), device=CPU, timeout=120.0)
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "lr_scheduler": None, "max_grad_norm": 1.0, "grad_scaler": None}
    given |= {"optimizer": partial(torch.optim.AdamW, lr=0.1), "seed": 0, "device": CPU, "timeout": 120.0}
    try:
        return Trials(Options(**(given | options), model=model), world, collectives).best(found, batch or make_given())
    finally:
        collectives.close()


def states(model: nn.Module) -> list[Any]:
    """All that a trial could change."""
    tensors = [x.clone() for x in (*model.parameters(), *model.buffers())]
    numbers = [module.calls for module in model.modules() if isinstance(module, Draws)]
    own = [module.own.get_state() for module in model.modules() if isinstance(module, Draws)]
    return [*tensors, *own, torch.get_rng_state(), numbers, random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.thorough
def test_nothing_is_left_of_a_trial() -> None:
    model, loss_fn, made = make_model(), make_loss(), []
    gradient = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    model[0].linear.weight.grad = gradient

    @named
    def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, lr=1e30))  # that would blow up
        return made[-1]

    copies: list[weakref.ref[Tensor]] = []

    def deepcopy(what: Any, memo: dict[int, Any]) -> Any:
        found = copy.deepcopy(what, memo)
        if what is model:
            copies.extend(weakref.ref(x) for x in found.parameters())
        return found

    before, threads, hooks = states(model), threading.active_count(), len(seen)
    with mock.patch.object(trial, "copy", mock.Mock(deepcopy=deepcopy)):
        best, predicted = try_them(model, plans()[:1], loss_fn=loss_fn, optimizer=optimizer)
    near(states(model), before, atol=0.0)
    assert copies
    assert not [each for each in copies if each() is not None]
    assert model[0].linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert (made, loss_fn.calls, len(seen)) == ([], [0], hooks)  # type: ignore[attr-defined]
    assert threading.active_count() == threads
    # The run's own seconds stand in the plan.
    assert best.simulated_step_time == simulated(best).timeline.batch_seconds != predicted.simulated_step_time
    assert re.match(r"tried for \d+ steps: ", best.notes[-1])
    assert Plan.from_json(best.to_json()) == best


def times(one: Plan, ratio: float) -> Plan:
    forward, backward = ([ratio * seconds for seconds in one.seconds(op)] for op in (Op.F, Op.B))
    return replace(one, costs=replace(one.costs, forward=forward, backward=backward))


def choose(found: list[Plan], slower: dict[int, float]) -> tuple[Plan, list[int]]:
    """Choice of trials where plans of so many microbatches take so many times the predicted seconds; and the M of
    those that are carried out."""
    ran = []

    def carried_out(self: Trials, one: Plan, given: Given, *, seconds: float, settles: bool) -> Any:
        del self, given, seconds
        assert one.num_microbatches is not None
        assert settles == (not any(map(slower.get, ran)))  # until one has run
        ran.append(one.num_microbatches)
        if not slower[one.num_microbatches]:
            return "out of memory on rank 0: all of it"
        timeline = simulated(times(one, slower[one.num_microbatches])).timeline
        return [timeline] * 3, Costs(overhead=one.costs.overhead)

    with mock.patch.object(Trials, "_try", carried_out):
        return try_them(make_model(), found)[0], ran


def test_the_best_measured_wins() -> None:
    whole = plans()  # M = 2 takes 2.4 ms, M = 4 twice that, M = 8 four times
    scaled = [times(one, k) for one, k in zip(whole, (1.0, 0.51, 0.2575), strict=False)]
    near = [replace(one, simulated_step_time=simulated(one).timeline.batch_seconds) for one in scaled]
    assert [one.num_microbatches for one in near] == [2, 4, 8]
    assert to_try(near[0], near[1:], trials=3, noise=0.1) == near
    assert to_try(near[0], near[1:], trials=2, noise=0.1) == near[:2]
    assert to_try(whole[0], whole[1:], trials=3, noise=0.1) == whole[:1]  # others take too long
    # All that come near are carried out, however slow the first one turned out to be.
    best, ran = choose(near, {2: 2.0, 4: 1.5, 8: 3.0})
    assert (best.num_microbatches, ran) == (4, [2, 4, 8])
    assert sum(note.startswith("tried, too: ") for note in best.notes) == 2
    best, ran = choose(near, {2: 2.0, 4: 3.0, 8: 1.0})
    assert (best.num_microbatches, ran) == (8, [2, 4, 8])
    # One that takes too much memory loses; where all do, the first stays as it was predicted.
    best, ran = choose(near, {2: 0.0, 4: 1.0, 8: 1.0})
    assert (best.num_microbatches, ran[:2]) == (4, [2, 4])
    best, ran = choose(near, {2: 0.0, 4: 0.0, 8: 0.0})
    assert best.num_microbatches == 2
    assert best.simulated_step_time == near[0].simulated_step_time
    assert sum("out of memory on rank 0" in note for note in best.notes) == 3


MODEL = make_model()


def with_a_global(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + MODEL[0].linear.weight.square().sum()


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.lock = threading.Lock()


def test_what_is_not_tried_says_why() -> None:
    one = plans()[0]
    x, y = make_batch()
    parts = tuple(Given(arguments=Arguments.of((x[:n],)), target=y[:n]) for n in (2, 6))
    model = make_model()
    itself = {"loss_fn": lambda output, target: F.mse_loss(output, target) + model[0].linear.weight.square().sum()}
    cases: list[tuple[str, nn.Module, Plan, dict[str, Any]]] = [
        ("on rank 0 the model cannot be copied: TypeError: cannot pickle", nn.Sequential(Locked()), one, {}),
        ("on rank 0 loss_fn cannot be copied: TypeError: cannot pickle", make_model(), one, {"loss_fn": Locked()}),
        ("loss_fn, or a hook, computes with parameters of the model itself", model, one, itself),
        ("loss_fn, or a hook, computes with parameters of the", MODEL, one, {"loss_fn": with_a_global}),
        ("compile= would compile", make_model(), one, {"compile": {}}),
        ("microbatches differ in size", make_model(), one, {"batch": replace(parts[0], microbatches=parts)}),
        ("all ranks are in one process", make_model(), plans(2, pipeline_sizes=(2,), data_sizes=(1,))[0], {}),
        ("batches of a stream overlap", make_model(), plans(schedules=("2bw",))[0], {}),
        ("9.00 s take longer than 16.0 s, the time of a", make_model(), replace(one, simulated_step_time=9.0), {}),
        ("a copy of the model in addition to the run takes", make_model(), limited(one), {}),
    ]
    for reason, model, found, options in cases:
        with mock.patch.object(Trials, "_carry_out", side_effect=AssertionError):
            best, predicted = try_them(model, [found], **options)
        assert best is predicted
        assert best.notes[-1].startswith("not tried: ")
        assert reason in best.notes[-1]
        assert replace(best, notes=found.notes) == found


def limited(found: Plan) -> Plan:
    return replace(found, stages=tuple(replace(s, memory_limit=s.memory_bytes) for s in found.stages))


def test_errors_are_those_of_the_run() -> None:
    model = make_model()
    with pytest.raises(KeyError, match="of the user"):
        try_them(model, plans()[:1], optimizer=fails(KeyError("of the user")))
    assert all(parameter.grad is None for parameter in model.parameters())
    best, _ = try_them(model, plans()[:1], optimizer=fails(torch.OutOfMemoryError("CUDA out of memory. Tried")))
    assert best.notes[-1].endswith("out of memory on rank 0: CUDA out of memory. Tried")


def test_a_batch_that_microbatches_do_not_divide() -> None:
    x, y = (torch.cat([each, each])[:10] for each in make_batch())
    with profiled():
        pipe = make_pipe(1, num_microbatches=4, trials=1, optimizer=None, max_grad_norm=None, lr_scheduler=None)
        pipe.forward_backward(x, y)
    assert pipe.plan is not None
    assert pipe.plan.microbatch_size == 3
    assert any(note.startswith("tried for ") for note in pipe.plan.notes)
    pipe.close()


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


def test_code_that_changes_its_batch_counts_and_knows_its_parameters() -> None:
    hooked: list[str] = []

    def train(**options: Any) -> list[Any]:
        model, counting, made = make_model().insert(0, Scales()), make_loss(), []
        names = {parameter: name for name, parameter in model.named_parameters()}

        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            for parameter in parameters:
                parameter.register_hook(lambda gradient: hooked.append("here"))
            biases, others = ([p for p in parameters if ("bias" in names[p]) is wanted] for wanted in (True, False))
            made.append(torch.optim.Adagrad([{"params": biases, "lr": 0.01}, {"params": others}], lr=0.1))
            return made[-1]

        settings: dict[str, Any] = {"num_microbatches": 2, "optimizer": optimizer, "max_grad_norm": 1.0} | options
        settings["loss_fn"] = lambda output, target: counting(output, target.add_(1))
        pipe = PipelineModule(model, **records(**settings))
        hooked.clear()
        pipe.build(*make_batch())
        assert (pipe.plan is not None) == bool(options)
        assert pipe.plan is None or any(note.startswith("tried for ") for note in pipe.plan.notes)
        assert not hooked or options
        assert (len(made), counting.calls) == (1, [0])  # type: ignore[attr-defined]
        hooked.clear()
        losses = [pipe.train_step(*make_batch(step)).loss for step in range(3)]
        found = [*states(model), losses, len(hooked)]
        pipe.close()
        return found

    with mock.patch.object(auto, "PROFILE_SECONDS", 0.01):
        with_trial = train(schedule="auto", trials=1)
    near(with_trial, train(), atol=0.0)


Trained = tuple[list[float], dict[str, Tensor], list[Any], str]


def train(trials: int) -> Trained:
    groups = len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with profiled():
        pipe = make_pipe(trials=trials, num_microbatches=4)
        losses = [pipe.train_step(*make_batch(step)).loss for step in range(3)]
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    state, found = pipe.full_state_dict(), pipe.plan
    drawn.append(len(dist.distributed_c10d._world.pg_map) - groups)
    assert found is not None
    pipe.close()
    return [loss for loss in losses if loss is not None], state, drawn, found.to_json()


@pytest.mark.thorough
def test_training_is_the_same_to_the_last_bit(gloo: Pool) -> None:
    with_trial, without = (gloo.run(train, ranks=2, args=(trials,)) for trials in (1, 0))
    for one, other in zip(with_trial, without, strict=True):
        near(one[:3], other[:3], atol=0.0)
        assert len(one[0]) == 3
        assert one[3] == with_trial[0][3]  # the same plan on every rank
        tried, untried = (Plan.from_json(each[3]) for each in (one, other))
        assert [stage.nodes for stage in tried.stages] == [stage.nodes for stage in untried.stages]
        assert any(note.startswith("tried for ") for note in tried.notes)
        assert not any("tried for " in note for note in untried.notes)


def train_with_failures() -> tuple[str, ...]:
    """Outcome of a trial whose rank 1 has no memory left, of one in which the user's code fails there, and of one that
    the user interrupts there."""
    lost = torch.OutOfMemoryError("CUDA out of memory")
    return tuple(_with_a_failure(each) for each in (lost, KeyError("of the user"), KeyboardInterrupt("by hand")))


def _with_a_failure(error: BaseException) -> str:
    with profiled():
        pipe = make_pipe(optimizer=fails(error, on=1), num_microbatches=4, trials=1)
        try:
            pipe.build(*make_batch())
        except BaseException as failed:
            return f"{type(failed).__name__}: {failed}"
        assert pipe.plan is not None
        return "; ".join(pipe.plan.notes)


@pytest.mark.thorough
def test_a_failure_on_one_rank_is_told_on_all(gloo: Pool) -> None:
    of_memory, own, interrupted = zip(*gloo.run(train_with_failures, ranks=2), strict=True)
    assert own[1] == "KeyError: 'of the user'"
    assert interrupted[1] == "KeyboardInterrupt: by hand"
    for each, cause in ((own[0], "KeyError: 'of the user'"), (interrupted[0], "KeyboardInterrupt: by hand")):
        assert each.count("cause: ") == 1
        assert each.endswith(f"cause: rank 1 failed: {cause}")
    for each in of_memory:
        assert "out of memory on rank 1: CUDA out of memory" in each
