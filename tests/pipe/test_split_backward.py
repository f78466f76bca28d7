"""I and W as actions of their own, and units that torch.compile compiles: equal to whole and uncompiled ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.small import make
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from stagewright import PipelineModule
from stagewright.schedules import Action, Costs, Op, Schedule, Timeline, build, simulate


def test_what_ran_is_what_the_schedule_says_and_its_costs_make_a_schedule() -> None:
    """I and W are recorded one after the other, whether they ran as one or apart; the automatic schedules take them."""

    def run(schedule: Any, **options: Any) -> tuple[PipelineModule, Timeline]:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        settings = {"schedule": schedule, "mesh": {"pipe": 3}, "loss_fn": F.mse_loss}
        pipe = PipelineModule(model, **settings, **options)
        return pipe, pipe.forward_backward(torch.randn(8, 4), torch.randn(8, 4)).timeline()

    pipe, timeline = run("zb-h1", num_microbatches=4)
    schedule = build("zb-h1", num_ranks=3, num_microbatches=4)
    for trace, program in zip(timeline.ranks, schedule.programs, strict=True):
        assert tuple(span.what for span in trace.compute) == program
        ends = [0.0] + [span.end for span in trace.compute]
        assert all(before <= span.start <= span.end for before, span in zip(ends, trace.compute, strict=False))
    costs = pipe.measured_costs()
    assert isinstance(costs, Costs)
    table = costs.table(num_stages=3)
    assert all(i > 0 and w > 0 for i, w in zip(table.column(Op.I), table.column(Op.W), strict=True))
    assert simulate(schedule, costs).makespan > 0
    found = build("zb-2p", num_ranks=3, num_microbatches=8, costs=costs, memory_limit=4)
    assert run(found)[1].peak_activations <= (4, 4, 4)


class Counting(Parts, linear=lambda: nn.Linear(4, 4), norm=lambda: nn.LayerNorm(4), calls=0, checkpoint=None):
    """Counts its forwards; `checkpoint`: runs its linear again in the backward, by torch's own means."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.gelu(self.norm(self.linear(x)))

        return run(x) if self.checkpoint is None else checkpoint(run, x, use_reentrant=self.checkpoint)


def gradients(schedule: Any, make: Callable[[], nn.Module], **options: Any) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(3)
    model = make()
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    settings = {"num_microbatches": 3, "loss_fn": nn.functional.mse_loss, "mesh": {"pipe": 2}}
    with PipelineModule(model, **records(schedule=schedule, **(settings | options))) as pipe:
        pipe.forward_backward(x, target)
    return [p.grad for p in model.parameters() if p.grad is not None], model


@pytest.mark.thorough(but=["None-none"])
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "selective"])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_a_block_runs_again_once_a_microbatch(recompute: str, checkpoint: bool | None) -> None:
    def make() -> nn.Module:
        blocks = [Counting(checkpoint=checkpoint) for _ in range(4)]
        return nn.Sequential(nn.Linear(4, 4), *blocks)  # use_reentrant=True wants an input with a gradient

    whole, plain = gradients("1f1b", make, recompute=recompute)
    split, model = gradients("zb-h1", make, recompute=recompute)
    assert all(map(torch.equal, whole, split))
    counts = [[block.calls for block in blocks] for blocks in (plain[1:], model[1:])]
    assert counts[0] == counts[1]
    assert max(counts[1]) <= 2 * 3 + 2  # shape inference runs each, too


def with_late_weights(schedule: Schedule) -> Schedule:
    """Each backward in two halves, W behind the next I, and all of them in front of an update."""

    def program(actions: Sequence[Action]) -> tuple[Action, ...]:
        found: list[Action] = []
        owed: list[Action] = []
        for action in actions:
            if action.op is Op.F:
                found.append(action)
                continue
            found += [action._replace(op=Op.I)] if action.op is Op.B else []
            found += owed
            owed = [action._replace(op=Op.W)] if action.op is Op.B else []
            found += [] if action.op is Op.B else [action]
        return (*found, *owed)

    return replace(schedule, programs=tuple(map(program, schedule.programs)), name="late")


@pytest.mark.thorough(but=["2bw-none"])
@pytest.mark.parametrize(("name", "recompute"), [("2bw", "none"), ("pipedream", "layer"), ("paci", "none")])
def test_weight_versions(name: str, recompute: str) -> None:
    """W adds to the gradients of its update group, whichever version the weights have by then."""

    def state(schedule: Schedule) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(*[Counting() for _ in range(4)])
        settings: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "mesh": {"pipe": 2}, "recompute": recompute}
        with PipelineModule(
            model,
            **records(schedule=schedule, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **settings),
        ) as pipe:
            for _ in range(4):
                pipe.train_step(torch.randn(8, 4), torch.randn(8, 4))
            pipe.flush()
        return model.state_dict()

    schedule = build(name, num_ranks=2, num_microbatches=4)
    whole, split = state(schedule), state(with_late_weights(schedule))
    assert all(torch.equal(whole[key], split[key]) for key in whole)


def test_a_stage_that_leaves_little_to_w_is_told() -> None:
    def recurrent() -> nn.Module:
        class Last(Parts, lstm=lambda: nn.LSTM(4, 8)):
            def forward(self, x: Tensor) -> Tensor:
                return self.lstm(x[None])[0][0]  # type: ignore[no-any-return]

        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Last(), nn.Linear(8, 4))

    with pytest.warns(UserWarning, match=r"backward of stage 1 .*, but the gradients of 'lstm.weight_ih_l0'"):
        split, _ = gradients("zb-h1", recurrent)
    whole, _ = gradients("1f1b", recurrent)
    assert all(map(torch.equal, whole, split))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor imports it
def test_compiled_parts_are_refused() -> None:
    def blocks() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    def with_compiled_module() -> nn.Module:
        model = blocks()
        model[2].compile(backend="aot_eager")
        return model

    with pytest.raises(ValueError, match=r"splits the backward of stage 0 .* expected compile=False, or a schedule wi"):
        gradients("zb-h1", blocks, compile={"backend": "aot_eager"})
    with pytest.raises(ValueError, match=r"the compiled Linear in it is one piece: expected it without"):
        gradients("zb-h1", with_compiled_module)


def compiled_on_one_rank() -> str:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    model[3].compile(backend="eager")
    with pytest.raises(ValueError, match=r"splits the backward of stage 1 .* and the backward of the compiled Linear"):
        make(model=model, schedule="zb-h1")
    return "refused"


@pytest.mark.thorough
def test_compiled_parts_are_refused_on_every_rank(gloo: Pool) -> None:
    """Rank 0 heard of it as of a failure of its peer."""
    assert gloo.run(compiled_on_one_rank, ranks=2) == ["refused"] * 2


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it

WIDTH, M = 6, 4
EAGER = {"backend": "aot_eager"}  # its graphs draw random numbers as torch does; inductor's do not


class Block(
    Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), norm=lambda: nn.BatchNorm1d(WIDTH), drop=lambda: nn.Dropout(0.2)
):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Skipping(Parts, blocks=lambda: nn.ModuleList([Block() for _ in range(4)])):
    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x) * 2
        for block in self.blocks[1:]:
            x = block(x)
        return x + first


def chain() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


def made(model: Any, dtype: torch.dtype = torch.float64, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_microbatches": M, "loss_fn": F.mse_loss, "mesh": {"pipe": 2}}
    settings["optimizer"] = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    return PipelineModule(model().to(dtype), **records(**(settings | options)))


def trained(model: Any, sizes: tuple[int, ...] = (40,) * 4, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and buffers, and losses of evaluations, after batches of these sizes."""
    torch._dynamo.reset()
    counters.clear()
    pipe, losses = made(model, **options), []
    for step, size in enumerate(sizes):
        x, y = batch(step, samples=size)
        pipe.train_step(x, y)
        if step % 2:
            losses.append(pipe.eval_step(x, y).loss or 0.0)
    state = pipe.full_state_dict()
    pipe.close()
    return state, losses


CASES = [
    ("1f1b", chain, {"recompute": "full"}, 5),  # in training without a graph, too
    ("2bw", Skipping, {"mesh": {"pipe": 2, "data": 2}}, 3),
]
MORE_CASES = [
    ("interleaved", Skipping, {}, 3),
    ("2bw", chain, {}, 3),
    ("pipedream", Skipping, {"recompute": "layer"}, 3),
]
NAMES = [f"{schedule}-{model.__name__}-{''.join(options)}" for schedule, model, options, _ in CASES + MORE_CASES]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "model", "options", "graphs"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_CASES)],
    ids=NAMES,
)
def test_equal_to_uncompiled(schedule: str, model: Any, options: dict[str, Any], graphs: int) -> None:
    """And compiled twice for training (the model's input wants no gradient), once for evaluation: not for each unit,
    and not for each weight version."""
    settings = {"schedule": schedule, **options}
    expected = trained(model, **settings)
    assert not counters["stats"]["unique_graphs"]
    near(trained(model, compile=EAGER, **settings), expected)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.thorough
def test_batches_of_other_sizes() -> None:
    sizes = (8, 12, 16, 20, 24, 11, 13)
    expected = trained(chain, sizes, schedule="2bw")
    near(trained(chain, sizes, schedule="2bw", compile=EAGER), expected)
    assert counters["stats"]["unique_graphs"] <= 6
    assert not counters["graph_break"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor imports it
def test_inductor() -> None:
    """Its random numbers are its own, the same for any cut and when they are drawn again; or torch's, where told so."""
    own = trained(chain, compile=True, mesh={"pipe": 1})
    near(trained(chain, compile=True, recompute="layer"), own)
    options = {"options": {"fallback_random": True}}
    expected = trained(chain, schedule="2bw")
    near(trained(chain, schedule="2bw", compile=options), expected)


@pytest.mark.thorough
def test_float16_and_autocast() -> None:
    def run(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        pipe = made(chain, torch.float32, grad_scaler=torch.amp.GradScaler("cpu", init_scale=64.0), **options)
        x, y = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH), torch.zeros(16, WIDTH)
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                pipe.train_step(x, y)
        state = list(pipe.full_state_dict().values())
        pipe.close()
        return state

    for found, expected in zip(run(compile=EAGER), run(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_hooks_and_users_own_compiled_modules_stay() -> None:
    seen: list[str] = []

    def model() -> nn.Module:
        made = chain()
        made[1].register_forward_hook(lambda *_: seen.append("forward"))
        made[2].register_full_backward_hook(lambda *_: seen.append("backward"))
        made[3].compile(backend="eager")
        return made

    expected = trained(model, recompute="layer")
    before, length = list(seen), len(seen)
    near(trained(model, recompute="layer", compile=EAGER), expected)
    assert seen[length:] == before
    assert counters["stats"]["unique_graphs"] > 3


def test_what_is_refused() -> None:
    x = torch.randn(16, WIDTH, dtype=torch.float64)
    for option, message in {
        "inductor": "compile='inductor': expected True, or arguments of torch.compile",
        ("backend", "nonsense"): "compile={'backend': 'nonsense'}: torch.compile raises an error",
        ("bakend", "eager"): "compile={'bakend': ...}: expected arguments of torch.compile",
    }.items():
        with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
            made(chain, compile=option if isinstance(option, str) else dict([option]))
    for recompute, message in {
        "selective": r"recompute= chooses among results of operations in .* expected recompute='layer'",
        "nested": r"recompute= runs '0.linear' again, which is a part of a module that compile= compiles whole",
    }.items():
        rule: Any = {"*.linear": "full"} if recompute == "nested" else recompute
        with pytest.raises(ValueError, match=message):
            made(chain, compile=EAGER, recompute=rule, example_inputs=(x,))

    def users() -> nn.Module:
        model = chain()
        model[0].compile(backend="eager")
        return model

    def decorated() -> nn.Module:
        model = chain()
        model[0].forward = torch.compile(model[0].forward, backend="eager")
        return model

    whole = "what compile= compiles: expected compile=False"
    for model, what in {chain: whole, users: "the compiled Block in it", decorated: "the compiled Block in it"}.items():
        message = f"'paci' updates the weights of stage 0 .* the compiler decides in the backward of {what}"
        with pytest.raises(ValueError, match=message):
            made(model, schedule="paci", compile=EAGER if model is chain else False, example_inputs=(x,))


def test_a_hook_that_a_compiled_unit_would_not_see_is_refused() -> None:
    x, y = batch(0, samples=16)
    seen: list[str] = []
    pipe = made(chain, compile={"backend": "eager"})
    pipe.train_step(x, y)
    model = pipe._building.options.model
    assert isinstance(model, nn.Sequential)
    model[1].register_forward_hook(lambda *_: seen.append("unit"))
    pipe.train_step(x, y)
    assert seen == ["unit"] * M
    hook = model[1].linear.register_forward_hook(lambda *_: seen.append("inside"))  # type: ignore[union-attr,operator]
    with pytest.raises(ValueError, match=r"the hooks of module '1.linear' changed after the unit that it is"):
        pipe.train_step(x, y)
    hook.remove()
