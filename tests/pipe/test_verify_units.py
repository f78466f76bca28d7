"""verify: copies of units and of the whole model, what they see, and what they hold."""

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.inside import GPT, GPTConfig, WeightGradients, plain, stage, units, verification
from support.parts import Parts
from support.pipeline import assembled
from support.pool import Pool
from support.small import sgd
from torch import Tensor, nn

import stagewright as sw
from stagewright.pipe import PipelineModule, VerificationError

TOLD = "verify: no copy of the model fits, as it and its gradients take more than an eighth of the memory."


class Block(Parts, norm=lambda: nn.BatchNorm1d(8), drop=lambda: nn.Dropout(0.3), linear=lambda: nn.Linear(8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(self.norm(x)).tanh())


def blocks() -> nn.Module:
    first = Block()
    return nn.Sequential(first, Block(), Block(), Block(linear=first.linear))


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=8, length=8, layers=4, width=8, heads=2, dropout=0.2))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if output.dim() == 2 else F.cross_entropy(output.flatten(0, 1), target.flatten())


pipe_of = partial(assembled, mesh={"pipe": 2}, num_microbatches=2, verify="first", loss_fn=loss_fn, optimizer=sgd)


def no_copy_fits() -> AbstractContextManager[object]:
    return patch.object(plain, "copy_fits", lambda *args: False)


@contextmanager
def told() -> Iterator[list[str]]:
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("stagewright")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def trained(
    make: Callable[[], nn.Module], *, is_deferred: bool = False, **options: Any
) -> tuple[list[float | None], dict[str, Tensor], list[str], int]:
    """Losses and the state behind two steps, what was told, and units that were compared."""
    torch.manual_seed(0)
    count: list[str] = []
    ran = units.ran

    def counted(modules: Any, *given: Any, **options: Any) -> Any:
        count.extend(modules)
        return ran(modules, *given, **options)

    with no_copy_fits(), told() as lines, patch.object(units, "ran", counted):
        with sw.deferred() if is_deferred else nullcontext():
            model = make()
        size = (8, 8)
        batch = torch.randn(2, *size) if isinstance(model, nn.Sequential) else torch.randint(8, (2, *size))
        pipe = pipe_of(model, **options)
        losses = [pipe.train_step(*batch).loss for _ in range(2)]
        state = pipe.full_state_dict()
        pipe.close()
    return losses, state, [line for line in lines if "verif" in line], len(count)


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1", "recompute": "layer"},
    "full": {"schedule": "zb-h1", "recompute": "full"},
    "2bw": {"schedule": "2bw"},
    "deferred": {"is_deferred": True},
}


def agrees(make: Callable[[], nn.Module], options: dict[str, Any], rank: int = 0) -> int:
    losses, state, lines, count = trained(make, **options)
    without, expected, nothing, _ = trained(make, **options, verify=False)
    assert losses == without
    assert all(torch.equal(x, expected[name]) for name, x in state.items())
    assert nothing == []
    assert len(lines) == (rank == 0)
    assert all(line.startswith(TOLD) for line in lines)
    return count


@pytest.mark.thorough(but=["interleaved-blocks", "2bw-blocks"])
@pytest.mark.parametrize(("case", "make"), [(case, make) for case in CASES for make in (gpt, blocks)][:-1])
def test_good_models_agree_and_train_as_without(case: str, make: Callable[[], nn.Module]) -> None:
    assert agrees(make, CASES[case]) >= 4


class Counting(nn.Linear):
    """Computes something else in every forward, also in one that runs again."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x).mul(self.calls).tanh()


def chain(middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), middle or nn.Linear(8, 8), nn.Linear(8, 8))


def twice(graph: Any, example: object) -> Any:
    """A compiler's mistake, or a backend whose code does not compute what plain code does, as inductor's dropout."""
    del example
    return lambda *args: [x * 2 for x in graph(*args)]


def split_wrongly() -> AbstractContextManager[object]:
    put = WeightGradients.put

    def wrong(own: WeightGradients, weights: Any, compute: Any, *tensors: Tensor) -> None:
        put(own, weights, lambda *given: [2 * gradient for gradient in compute(*given)], *tensors)

    return patch.object(WeightGradients, "put", wrong)


FAULTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[], AbstractContextManager[Any]], str]] = {
    "split": (chain, {"schedule": "zb-h1"}, split_wrongly, "unit '0' .*: the gradient of '0.bias'"),
    "compiled": (
        chain,
        {"precision": sw.Precision(compile={"backend": twice})},
        nullcontext,
        "unit '0' .*: its output differs",
    ),
    "again": (lambda: chain(Counting(8, 8)), {"recompute": "layer"}, nullcontext, "unit '2' .*: a gradient of its inp"),
    "statistics": (
        chain,
        {"recompute": "full"},
        lambda: patch.object(stage, "standing_in", lambda *args: nullcontext()),
        "unit '1' .*: its buffer '1.running_mean' differs",
    ),
}


@pytest.mark.thorough(but=["split", "again"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.parametrize("name", FAULTS)
def test_a_unit_that_its_stage_runs_otherwise_is_named(name: str) -> None:
    make, options, fault, expected = FAULTS[name]
    model = make()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with no_copy_fits(), fault(), pytest.raises(VerificationError, match=f"verify: {expected}"):
        pipe_of(model, **options).train_step(torch.randn(4, 8), torch.randn(4, 8))
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def over_processes(case: str, rank: int) -> tuple[int, str]:
    """The fault is in the process of rank 0 alone, whose stage has unit 0."""
    count = agrees(gpt, CASES[case], rank=rank)
    make, options, fault, _ = FAULTS["split"]
    with no_copy_fits(), fault() if rank == 0 else nullcontext(), pytest.raises(VerificationError) as raised:
        pipe_of(make(), **options).train_step(torch.randn(4, 8), torch.randn(4, 8))
    return count, str(raised.value)


def in_process(case: str) -> tuple[int, str]:
    return over_processes(case, torch.distributed.get_rank())


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["1f1b", "zb-h1", "2bw", "deferred"])
def test_over_processes_each_compares_its_own_and_all_are_told(gloo: Pool, case: str) -> None:
    (first, said), (second, also) = gloo.run(in_process, ranks=2, args=(case,))
    assert min(first, second) >= 2
    assert said == also
    assert "unit '0'" in said


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("holds a file")


def test_what_cannot_be_copied_is_told_and_units_bring_no_others_along() -> None:
    def lines(model: nn.Module) -> list[str]:
        with no_copy_fits(), told() as found:
            pipe_of(model).train_step(torch.randn(4, 8), torch.randn(4, 8))
        return found[1:]

    one = "'2': NotVerifiableError: verify needs a copy of the model, and copy.deepcopy(model) fails: holds a file"
    (said,) = lines(chain(Uncopied(8, 8)))
    assert said.startswith(f"verify leaves out units (1; {one}")
    (said,) = lines(nn.Sequential(Uncopied(8, 8), Uncopied(8, 8)))
    assert said.startswith("the first batch is not verified, as no unit can be (2; '0': NotVerifiableError")
    with pytest.raises(ValueError, match=r"copy.deepcopy\(model\) fails: holds a file"):
        pipe_of(chain(Uncopied(8, 8)), verify=True).train_step(torch.randn(4, 8), torch.randn(4, 8))
    model: Any = chain()
    model[2].others = [model[0]]
    with no_copy_fits(), told() as lines:
        pipe_of(model).train_step(torch.randn(4, 8), torch.randn(4, 8))
    assert "verify leaves out units (1; '2': NotVerifiableError: verify needs a copy" in lines[1]


def test_a_call_compares_too_and_true_demands_the_copy() -> None:
    with no_copy_fits():
        pipe, whole = pipe_of(chain()), pipe_of(chain(), verify=True)
        batch = torch.randn(2, 4, 8)
        assert pipe.verify(*batch).num_gradients == 8
        assert pipe.verify(*batch).copy_bytes == 4 * 72
        assert pipe.num_steps == 0
        assert whole.verify(*batch).copy_bytes > 4 * 72


def held() -> int:
    """Bytes of all tensors there are."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_it_holds_a_copy_of_one_unit_and_its_gradients() -> None:
    most: list[int] = []
    ran = units.ran

    def counted(*args: Any, **options: Any) -> Any:
        found = ran(*args, **options)
        most.append(held())
        return found

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    pipe, before = pipe_of(model), held()
    with no_copy_fits(), patch.object(units, "ran", counted):
        pipe.verify(torch.randn(4, 256), torch.randn(4, 256))
    assert len(most) == 8
    assert max(most) - before < 2.4 * 4 * 256 * 257
    assert held() - before < 0.1 * 4 * 256 * 257


class Residual(nn.ModuleList):
    """Blocks in a list, so that the model is recorded."""

    def __init__(self, around: Callable[[Any], Any]) -> None:
        super().__init__(around(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


def closure(block: Any) -> Any:
    old = block.forward
    block.forward = lambda x: old(x) * 2
    return block


def compiled(block: nn.Module) -> Any:
    return torch.compile(block, backend=twice)


def called_compiled(block: nn.Module) -> nn.Module:
    outer = closure(block)
    outer.compile(backend="eager")
    return block


def checked_pipe(model: nn.Module, loss_fn: Any = loss_fn, **options: Any) -> PipelineModule:
    return pipe_of(model, **({"loss_fn": loss_fn, "verify": True} | options))


def trained_around(around: Callable[[Any], Any], **options: Any) -> tuple[list[float | None], dict[str, Tensor]]:
    torch.manual_seed(0)
    pipe = checked_pipe(Residual(around), **options)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler looks at it
        losses = [pipe.train_step(*torch.randn(2, 4, 4, generator=generator)).loss for _ in range(2)]
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


@pytest.mark.thorough(but=["closure", "compiled"])
@pytest.mark.parametrize("around", [closure, compiled, called_compiled])
def test_a_correct_run_goes_on_with_the_statistics_that_it_has(around: Callable[[Any], Any]) -> None:
    """The copy ran the user's own blocks: running statistics moved twice as much, and no run with them passed."""
    (losses, state), (without, expected) = trained_around(around), trained_around(around, verify=False)
    assert losses == without
    assert all(torch.equal(x, expected[name]) for name, x in state.items())


@pytest.mark.thorough
def test_over_processes_the_copy_has_all_weights(gloo: Pool) -> None:
    """Its blocks ran those of the user, whose weights other processes hold: tensors on the device meta."""
    for around in (closure, compiled, called_compiled):
        alone = trained_around(around)[0]
        for losses, _ in gloo.run(trained_around, ranks=2, args=(around,)):
            assert losses == alone


def test_a_difference_within_a_closure_is_seen() -> None:
    """The check was of the user's blocks with themselves."""
    model = Residual(closure)
    part: Any = model[1][0]
    own = id(part)
    part.register_forward_hook(lambda module, args, output: output * (1 if id(module) == own else 2))
    with pytest.raises(VerificationError, match="the loss is"):
        checked_pipe(model).train_step(torch.randn(4, 4), torch.randn(4, 4))


class Auxiliary(nn.Linear):
    """Leaves a loss of its own in a list, and by itself."""

    def __init__(self, left: list[Tensor]) -> None:
        super().__init__(4, 4)
        self.left = left
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.square().mean()
        self.left.append(self.last)
        return y


@pytest.mark.parametrize("reads", ["attribute", "list"])
def test_a_loss_that_reads_what_the_last_stage_leaves_reads_that_of_the_copy(reads: str) -> None:
    left: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Auxiliary(left))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        extra = left.pop()
        left.clear()
        extra = extra if reads == "list" else model[-1].last
        return F.mse_loss(output, target) + extra / (1 + holder["pipe"].num_steps)

    pipe = checked_pipe(model, loss_fn, verify=2)
    holder = {"pipe": pipe}  # which no copy is made of
    for _ in range(3):
        pipe.train_step(torch.randn(4, 4), torch.randn(4, 4))


def test_it_holds_one_copy_of_the_weights_and_gradients_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were three copies of weights, and three of gradients."""
    found: list[int] = []
    freed: list[str] = []
    run = plain.PlainModule.run

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        outcome = run(self, *given, **options)
        found.append(held())
        return outcome

    monkeypatch.setattr(plain.PlainModule, "run", counted)
    monkeypatch.setattr(verification, "_LARGE", 2**20)  # the model's bytes are just above
    monkeypatch.setattr(verification, "give_back", lambda device: freed.append(device.type))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    pipe, before = checked_pipe(model), held()
    pipe.train_step(torch.randn(4, 256), torch.randn(4, 256))
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert found[0] - before < 3.2 * weights
    for p in model.parameters():
        p.grad = None
    assert held() - before < 0.1 * weights
    assert freed == ["cpu"]


def test_a_copy_that_uses_the_model_is_no_check(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        made: Any = Residual(lambda block: block)
        made[1].parents = [weakref.ref(made)]
        return made

    batch = torch.randn(4, 4), torch.randn(4, 4)
    told = r"'parents' of module '1' of the copy still uses the model's own modules.*or verify=False"
    with pytest.raises(ValueError, match=told):
        checked_pipe(model()).train_step(*batch)
    with caplog.at_level(logging.INFO, logger="stagewright"):
        checked_pipe(model(), verify="first").train_step(*batch)
    assert "the first batch is not verified: verify needs a copy" in caplog.text
