"""The reference for asynchronous schedules: one process that keeps every version of the weights.

Written from the specification alone; nothing here imports stagewright. `replay` runs the microbatches one after the
other, each stage of each one on a copy of the weights that the rule names:

    2bw             batch t: version max(t - 1, 0) on every stage; version t + 1 = step(version t, gradient of batch t)
    pipedream       the newest version of each stage when its own program comes to the forward; so in the backward
    vertical sync   the number that stage 0 has there, on every stage
    paci            as pipedream in the forward; in the backward the newest weights stand where those of the forward did
    1f1b            batch t: version t, as in any flush schedule; it shows that the rest of the replay is right
    flush_first=N   batches below N: the newest version on every stage; behind them the rule, and no version before that

Why one after the other is enough: each stage runs its backwards in the order of microbatches, so gradients add up in
that order, and no microbatch sees an update that waits for a later one.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import models
from .cases import listed, same
from .models import Chain, masked_token_loss, seeded_units, task_of
from .reference import Seeder, copied, cut, make_optimizers, make_scheduler, step_scheduler

UNEVEN = (11, 13, 8, 10, 9, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCase:
    """A training run under "2bw", "pipedream", "paci" or "1f1b".

    num_ranks: all of them, replicas included.
    update_every: microbatches; only under pipedream and paci.
    warmup: only under 2bw; it changes no number.
    replicas: under 2bw and 1f1b they change no number; under paci, when which update is there.
    sizes: samples of each batch; most numbers of microbatches divide 12: stages are inferred for each size of one.
    flush_first: batches that have a flush behind each update.
    flushes, evals: the batches behind which the pipeline is flushed, or evaluated (which drains it too).
    as_stages: the stages are given one by one.
    bounds: the first child of each stage but the first, of an nn.Sequential; equal numbers by default.
    """

    task: str
    schedule: str = "2bw"
    num_ranks: int = 2
    num_microbatches: int = 4
    update_every: int = 1
    vertical_sync: bool = False
    warmup: str | tuple[int, ...] = "plain"
    replicas: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = (12,) * 6
    flush_first: int = 0
    flushes: tuple[int, ...] = ()
    evals: tuple[int, ...] = ()
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    decay: bool | str = False
    feedback: float | None = None  # factor of the delay correction; None: gradients are used as late as they are
    feedback_delay: float | None = None  # of all stages
    feedback_fresh: float = 1.0  # lambda of what is corrected, in the first batches
    recompute: str = "none"
    autocast: bool = False  # float32 weights, bfloat16 around the whole loop
    as_stages: bool = False
    bounds: tuple[int, ...] | None = None
    seed: int = 2024

    @property
    def num_stages(self) -> int:
        return len(self.replicas) if self.replicas else self.num_ranks

    @property
    def group_size(self) -> int:
        """Microbatches from update to update."""
        return self.update_every if self.schedule in ("pipedream", "paci") else self.num_microbatches

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast else torch.float64

    @property
    def tolerance(self) -> float:
        """0 where everything is added up in the reference's order."""
        task = task_of(self.task)
        reordered = self.replicas or task.tied or task.kind == "traced" or task.loss is masked_token_loss
        if not reordered and self.max_grad_norm is None:
            return 0.0
        return 1e-10 if self.optimizer.startswith(("adamw", "rates")) else 1e-12

    @property
    def loss_tolerance(self) -> float:
        """Tolerance of the reported figure: how it is made of update groups, and in which type, is left open."""
        is_in_parts = self.group_size != self.num_microbatches
        return 1e-6 if self.autocast else 1e-12 if is_in_parts else 0.0


@dataclass(kw_only=True)
class AsyncOutcome:
    """Results in one process; the state is the whole model's, the optimizer's that of its own parameters."""

    losses: dict[int, float] = field(default_factory=dict)  # by step
    grad_norms: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)  # broken promises that need no reference


def make_model(case: AsyncCase) -> nn.Module:
    """The untrained model, the same at every call; stages that are given one by one as a `Chain`."""
    model = models.make_model(case.task, num_stages=case.num_stages, dtype=case.dtype)
    if case.as_stages:
        children = list(model.children())
        ends = [*case_bounds(case, len(children)), len(children)]
        model = Chain([nn.Sequential(*children[a:b]) for a, b in zip([0, *ends], ends, strict=False)])
    return model.train()


def make_batch(case: AsyncCase, t: int, size: int) -> tuple[tuple[Tensor, ...], Any]:
    """Batch t with `size` samples, the same at every call."""
    return models.make_batch(case.task, index=t, size=size, dtype=case.dtype)


def case_bounds(case: AsyncCase, num_children: int) -> tuple[int, ...]:
    return case.bounds or tuple(num_children * s // case.num_stages for s in range(1, case.num_stages))


def autocast(case: AsyncCase) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()


def optimizer_states(named: Sequence[tuple[str, Tensor]], optimizers: Any) -> dict[str, Tensor]:
    """Copies of what optimizers keep for each parameter, as "0.weight: exp_avg"."""
    states = [optimizer.state for optimizer in optimizers if optimizer is not None]
    return {
        f"{name}: {key}": torch.as_tensor(value).detach().clone()
        for name, parameter in named
        for state in states
        for key, value in state.get(parameter, {}).items()
        if value is not None
    }


class Use(NamedTuple):
    """Versions of one stage for one microbatch: that of F and B, and the newest one when B comes."""

    right: int
    newest: int


def uses(case: AsyncCase) -> list[list[Use]]:
    """[microbatch of the run][stage]."""
    M, stages = case.num_microbatches, range(case.num_stages)
    if case.schedule not in ("pipedream", "paci"):
        delay, first = 1 if case.schedule == "2bw" else 0, case.flush_first
        batches = [t for t in range(len(case.sizes)) for _ in range(M)]
        return [[Use(right=t if t < first else max(t - delay, first), newest=t)] * len(stages) for t in batches]
    table = zip(*(_pipedream_uses(case, s) for s in stages), strict=True)
    first = case.vertical_sync and case.schedule == "pipedream"
    return [[Use(right=(row[0] if first else use).right, newest=use.newest) for use in row] for row in table]


def _pipedream_uses(case: AsyncCase, stage: int) -> list[Use]:
    """Each replica has its own microbatches: F(i), B(i - reach), U at the end of a group, and so on; a drain ends a
    stream."""
    M, counts = case.num_microbatches, case.replicas or (1,) * case.num_ranks
    reach = min((-(-sum(counts[s:]) // counts[s]) - 1) * counts[s] for s in range(stage + 1))
    drains = sorted({t for t in (*case.flushes, *case.evals, len(case.sizes) - 1) if t >= case.flush_first})
    group = case.update_every
    found = {i: Use(right=i // group, newest=i // group) for i in range(case.flush_first * M)}
    for first, last in zip([case.flush_first, *(t + 1 for t in drains)], drains, strict=False):
        for replica in range(counts[stage]):
            own = range(first * M + replica, (last + 1) * M, counts[stage])
            version, begun = first * M // case.update_every, iter(own)
            waiting, forwards = next(begun, None), {}
            for i in own:
                while waiting is not None and waiting <= i + reach:
                    forwards[waiting] = version
                    waiting = next(begun, None)
                found[i] = Use(right=forwards[i], newest=version)
                version += (i + counts[stage]) // case.update_every > i // case.update_every
    return [found[i] for i in sorted(found)]


def delay_of(case: AsyncCase, stage: int) -> float:
    """Updates by which the gradients of a stage are late, once the pipeline is full; a mean over microbatches."""
    if case.feedback_delay is not None:
        return case.feedback_delay
    if case.schedule not in ("pipedream", "paci"):
        return {"2bw": 1.0, "1f1b": 0.0}[case.schedule]
    in_flight = case.num_stages - 1 - (0 if case.vertical_sync else stage)
    return in_flight / case.update_every


class _Seeder(Seeder):
    def attach(self, units: Sequence[nn.Module]) -> None:
        for module in dict.fromkeys(units):
            module.register_forward_pre_hook(self._enter)


class _Replay:
    """`live` holds the newest weights, `versions` a copy of each that there was; buffers are shared by all.

    A piece is a part of the model that is called by itself and belongs to one stage.
    """

    def __init__(self, case: AsyncCase) -> None:
        self.case = case
        self.task = task_of(case.task)
        self.live = make_model(case)
        self.optimizers = make_optimizers(case.optimizer, list(self.live.named_parameters()))
        scheduler = make_scheduler(case.decay)
        self.schedulers = [scheduler(optimizer) for optimizer in self.optimizers] if scheduler is not None else []
        self.seeder = _Seeder([], seed=case.seed)
        self.versions: list[nn.Module] = []
        self.gradients: dict[str, Tensor | None] = {}
        self.last_updates: dict[str, Tensor] = {}  # without rate and decay
        self.count = 0  # of the update group, where losses are (sum, count)
        self.outcome = AsyncOutcome()
        pieces = range(len(_pieces(self.live)))
        bounds = case_bounds(case, len(pieces)) if isinstance(self.live, nn.Sequential) else pieces[1:]
        self.stage_of = [sum(bound <= piece for bound in bounds) for piece in pieces]
        self.keep()

    def keep(self) -> None:
        """The newest weights become a version."""
        version = copy.deepcopy(self.live)
        for ours, theirs in zip(version.modules(), self.live.modules(), strict=True):
            ours._buffers = theirs._buffers
        self.seeder.attach(seeded_units(version))
        self.versions.append(version)

    def forward(self, row: Sequence[Use], inputs: tuple[Tensor, ...], target: Any) -> Any:
        values: Any = inputs
        for piece, stage in enumerate(self.stage_of):
            result = _pieces(self.versions[row[stage].right])[piece](*values)
            values = result if isinstance(result, tuple) else (result,)
        return self.task.loss(result, target)

    def used(self, row: Sequence[Use]) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, the parameter that the forward used, the newest one) of all stages."""
        for name, _ in self.live.named_parameters():
            use = row[self.stage(name)]
            used = self.versions[use.right].get_parameter(name)
            yield name, used, self.versions[use.newest].get_parameter(name)

    def backward(self, loss: Tensor, row: Sequence[Use]) -> None:
        """Adds to the gradients as autograd does, whatever version they were computed with."""
        parameters = list(self.used(row))
        for name, used, _ in parameters:
            used.grad = self.gradients.get(name)
        with _newest(parameters) if self.case.schedule == "paci" else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        for name, used, _ in parameters:
            self.gradients[name], used.grad = used.grad, None

    def update(self, t: int, loss: float | None) -> None:
        """A step of the newest weights with the gradients of one update group, wherever these were computed.

        loss: the batch's, behind its last group.
        """
        for name, parameter in self.live.named_parameters():
            grad = self.gradients.get(name)
            if grad is not None and self.count:
                grad /= self.count
            parameter.grad = grad
        if self.case.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.live.parameters(), self.case.max_grad_norm)
            self.outcome.grad_norms.append(norm.item())
        for optimizer in self.optimizers:
            self.step(optimizer, is_fresh=t < self.case.flush_first)
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            step_scheduler(scheduler, loss)
        self.gradients, self.count = {}, 0
        self.keep()

    def step(self, optimizer: torch.optim.Optimizer, *, is_fresh: bool) -> None:
        """W(t+1) = (1 - lr wd) W(t) - lr (d(t) + lambda (d(t) - d(t-1))); d is what the optimizer does to W(t)."""
        if self.case.feedback is None:
            optimizer.step()
            return
        names = {id(parameter): name for name, parameter in self.live.named_parameters()}
        before = {id(p): p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        optimizer.step()
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            decay = group["weight_decay"] if type(optimizer).__name__ in ("AdamW", "Muon") else 0.0
            for parameter in group["params"]:
                name = names[id(parameter)]
                strength = self.case.feedback * delay_of(self.case, self.stage(name))
                strength = self.case.feedback_fresh if is_fresh and strength else strength
                if parameter.grad is None or not rate or not strength:
                    continue
                d = (before[id(parameter)] * (1 - rate * decay) - parameter.detach()) / rate
                if (last := self.last_updates.get(name)) is not None:
                    parameter.data = torch.sub(parameter.data, d - last, alpha=strength * rate)
                self.last_updates[name] = d

    def stage(self, name: str) -> int:
        return self.stage_of[int(name.split(".", maxsplit=1)[0]) if len(self.stage_of) > 1 else 0]

    def batch(self, t: int, table: Sequence[Sequence[Use]]) -> float:
        case, M = self.case, self.case.num_microbatches
        group = case.group_size
        inputs, target = make_batch(case, t, case.sizes[t])
        micro_inputs, micro_targets = cut(inputs, M), cut(target, M)
        sizes = [parts[0].shape[0] for parts in micro_inputs]
        loss, count = 0.0, 0
        for k in range(M):
            row = table[t * M + k]
            samples = sum(sizes[k - k % group : k - k % group + group])
            self.seeder.at(step=t, microbatch=k)
            with autocast(case):
                piece = self.forward(row, micro_inputs[k], micro_targets[k])
            if isinstance(piece, tuple):
                piece, counted = piece
                loss, count, self.count = loss + piece.item(), count + int(counted), self.count + int(counted)
            else:
                loss += piece.item() * (sizes[k] / sum(sizes))
                piece = piece * (sizes[k] / samples)
            with torch.autocast("cpu", enabled=False):  # as torch advises
                self.backward(piece, row)
            if (k + 1) % group == 0:
                self.update(t, None if k + 1 < M else loss / count if count else loss)
        return loss / count if count else loss

    def run(self) -> AsyncOutcome:
        table = uses(self.case)
        for t in range(len(self.case.sizes)):
            self.outcome.losses[t] = self.batch(t, table)
            if t in self.case.evals:
                self.outcome.evals.append(self.evaluate(t))
        self.outcome.state = copied(self.live.state_dict())
        self.outcome.optimizer_state = optimizer_states(list(self.live.named_parameters()), self.optimizers)
        for name, last in self.last_updates.items():
            self.outcome.optimizer_state[f"{name}: delay_correction.last_update"] = last
        return self.outcome

    def evaluate(self, t: int) -> float:
        self.live.eval()
        with torch.no_grad(), autocast(self.case):
            inputs, target = make_batch(self.case, 100 + t, self.case.sizes[0])
            loss = self.task.loss(self.live(*inputs), target)
        self.live.train()
        return float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)


def _pieces(model: nn.Module) -> list[nn.Module]:
    return list(model) if isinstance(model, nn.Sequential | Chain) else [model]


@contextlib.contextmanager
def _newest(parameters: Sequence[tuple[str, nn.Parameter, nn.Parameter]]) -> Iterator[None]:
    """While a backward runs, the newest weights are in the storage of the used ones."""
    kept = [(used.data, used.data.clone(), newest.data.clone()) for _, used, newest in parameters]
    for storage, _, newest in kept:
        storage.copy_(newest)
    yield
    for storage, values, _ in kept:
        storage.copy_(values)


@functools.cache
def replay(case: AsyncCase) -> AsyncOutcome:
    with torch.random.fork_rng(devices=[]):
        return _Replay(case).run()


def agree(outcomes: AsyncOutcome | Sequence[AsyncOutcome], case: AsyncCase) -> None:
    """Asserts that the outcomes of all processes of one run together equal the replay's, with the case's tolerances."""
    expected, tolerance, loss_tolerance = replay(case), case.tolerance, max(case.tolerance, case.loss_tolerance)
    outcomes = [outcomes] if isinstance(outcomes, AsyncOutcome) else outcomes
    for rank, outcome in enumerate(outcomes):
        assert not outcome.complaints, f"rank {rank}: {outcome.complaints}"
        same(f"rank {rank}, loss of step", outcome.losses, expected.losses, loss_tolerance)
        same(f"rank {rank}, eval loss", listed(outcome.evals), listed(expected.evals), max(loss_tolerance, 1e-12))
        for norm in outcome.grad_norms:
            nearest = min(expected.grad_norms, key=lambda known: abs(known - norm), default=float("inf"))
            assert abs(norm - nearest) <= max(loss_tolerance, 1e-12), f"rank {rank}: gradient norm {norm}, {nearest=}"
        same(f"rank {rank}, state", outcome.state, expected.state, tolerance)
        unknown = outcome.optimizer_state.keys() - expected.optimizer_state.keys()
        assert not unknown, f"rank {rank}: optimizer states {sorted(unknown)}"
        of_rank = {key: expected.optimizer_state[key] for key in outcome.optimizer_state}
        same(f"rank {rank}, optimizer state", outcome.optimizer_state, of_rank, tolerance)
    missing = expected.optimizer_state.keys() - {name for outcome in outcomes for name in outcome.optimizer_state}
    assert not missing, f"optimizer states of no rank: {sorted(missing)}"
