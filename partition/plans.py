"""A plan: which nodes make a stage, on which ranks, and what that is predicted to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .strict import Fields, parse_object

_JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStage:
    """One stage.

    Arguments:
        nodes: names, each behind what it needs.
        ranks: of its replicas; microbatch k runs on `ranks[k % replicas]`.
        forward_seconds, backward_seconds: of one microbatch on one rank [s].
        step_seconds: that the stage needs a microbatch with all its replicas, communication included [s].
        memory_bytes: predicted on each of its ranks [bytes]; None under PipeDream's model, which has none.
        in_flight: microbatches that one rank holds at once, warm-up + 1; None likewise.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    memory_bytes: float | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.nodes or not self.ranks:
            raise ValueError(f"stage with nodes={self.nodes}, ranks={self.ranks}: expected at least one of each")

    @property
    def replicas(self) -> int:
        """Ranks that run the stage, each on its share of the microbatches."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was not taken.

    Arguments:
        replicas: by stage.
        num_nodes: by stage.
        predicted_step_time: [s a minibatch].
        simulated_step_time: [s a batch]; None where it was not simulated.
    """

    replicas: tuple[int, ...]
    num_nodes: tuple[int, ...]
    predicted_step_time: float
    simulated_step_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in order, on ranks 0..num_devices-1; where a plan needs fewer, the rest stay idle.

    Arguments:
        cost_model: "default" or "pipedream".
        schedule: that memory was counted for; None under PipeDream's model.
        num_microbatches: of a batch, M; None where the plan does not depend on it.
        predicted_step_time: the bottleneck [s a minibatch]; a minibatch is what the profile ran at once, and what the
            runtime calls a microbatch.
        bound: no plan can have a smaller bottleneck under this model [s a minibatch].
        simulated_step_time: [s a batch of M] under the schedule, warm-up and drain included where it flushes; None
            where it was not simulated.
        simulated_bubble: of that simulation, a fraction.
        runners_up: what else was considered, the better ones first.
        notes: what was left out or could not be done.

    Raises ValueError for a node or rank that stands twice, and a rank outside the cluster.
    """

    stages: tuple[PlanStage, ...]
    num_devices: int
    cost_model: str
    predicted_step_time: float
    bound: float
    schedule: str | None = None
    num_microbatches: int | None = None
    simulated_step_time: float | None = None
    simulated_bubble: float | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("stages", "runners_up", "notes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if not self.stages:
            raise ValueError("plan without stages: expected at least one")
        _refuse_twice("node", [node for stage in self.stages for node in stage.nodes])
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        _refuse_twice("rank", ranks)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.num_devices:
                raise ValueError(f"rank {rank!r} on {self.num_devices} devices: expected 0 to {self.num_devices - 1}")

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage; (15, 1) is what the papers write as 15-1."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one: its bottleneck over the bound, less one."""
        return self.predicted_step_time / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Idle fraction of the ranks in use: simulated, or, where it was not, of a stream at the bottleneck's pace."""
        if self.simulated_bubble is not None:
            return self.simulated_bubble
        work = sum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)
        room = sum(self.replicas) * self.predicted_step_time
        return 1 - work / room if room > 0 else 0.0

    @property
    def memory_bytes(self) -> dict[int, float]:
        """By rank in use, what is predicted there [bytes]; empty under PipeDream's model."""
        return {
            rank: stage.memory_bytes for stage in self.stages for rank in stage.ranks if stage.memory_bytes is not None
        }

    def explain(self) -> str:
        """A table of the stages, then the runners-up with what each loses, then the notes."""
        config = "-".join(str(count) for count in self.replicas)
        lines = [
            f"{config} on {self.num_devices} devices, {self.cost_model} model: {_ms(self.predicted_step_time)} a "
            f"minibatch, at most {self.gap:.2%} above the best possible"
        ]
        if self.simulated_step_time is not None:
            lines.append(
                f"simulated, {self.schedule}, {self.num_microbatches} microbatches: {_ms(self.simulated_step_time)} a "
                f"batch, bubble {self.bubble:.1%}"
            )
        lines.append("stage  nodes  ranks       F ms       B ms    step ms  in flight  memory GB")
        for i, stage in enumerate(self.stages):
            memory = "-" if stage.memory_bytes is None else f"{stage.memory_bytes / 1e9:.3f}"
            flight = "-" if stage.in_flight is None else str(stage.in_flight)
            figures = (stage.forward_seconds, stage.backward_seconds, stage.step_seconds)
            seconds = " ".join(f"{each * 1e3:10.3f}" for each in figures)
            lines.append(
                f"{i:5}  {len(stage.nodes):5}  {_span(stage.ranks):9} {seconds}  {flight:>9}  {memory:>9}"
                f"  {stage.nodes[0]} .. {stage.nodes[-1]}"
            )
        for each in self.runners_up:
            lines.append(f"runner-up {'-'.join(str(n) for n in each.replicas)}: {self._loss(each)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _loss(self, other: RunnerUp) -> str:
        predicted = f"{_ms(other.predicted_step_time)} a minibatch"
        if other.simulated_step_time is None or self.simulated_step_time is None:
            return f"{predicted}, {other.predicted_step_time / self.predicted_step_time - 1:+.2%}"
        return (
            f"{predicted}; simulated {_ms(other.simulated_step_time)} a batch, "
            f"{other.simulated_step_time / self.simulated_step_time - 1:+.2%}"
        )

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        return json.dumps({"version": _JSON_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Read `to_json`'s form. ValueError names `source`, the field and what was expected."""
        record = parse_object(text, source=source)
        record.version(_JSON_VERSION)
        values = {
            "stages": tuple(_stage(each) for each in record.objects("stages")),
            "num_devices": record.count("num_devices"),
            "cost_model": record.text("cost_model", choices=("default", "pipedream")),
            "predicted_step_time": record.number("predicted_step_time"),
            "bound": record.number("bound"),
            "schedule": _optional(record, "schedule", str),
            "num_microbatches": _optional(record, "num_microbatches", int),
            "simulated_step_time": _optional(record, "simulated_step_time", float),
            "simulated_bubble": _optional(record, "simulated_bubble", float),
            "runners_up": tuple(_runner_up(each) for each in record.objects("runners_up")),
            "notes": tuple(str(note) for note in record.items("notes")),
        }
        record.done()
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), source=str(path))


def _optional(record: Fields, key: str, kind: type) -> object:
    """None, or a value of `kind`."""
    value = record.take(key, f"{kind.__name__} or null", default=None)
    accepted = (int, float) if kind is float else kind
    if value is not None and (isinstance(value, bool) or not isinstance(value, accepted)):
        raise ValueError(f"{record.at(key)}: {value!r}: expected {kind.__name__} or null")
    return value


def _whole_numbers(record: Fields, key: str, *, least: int) -> tuple[int, ...]:
    numbers = record.items(key)
    for i, value in enumerate(numbers):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{record.at(key)}[{i}]: {value!r}: expected a whole number of at least {least}")
    return tuple(int(str(value)) for value in numbers)


def _stage(record: Fields) -> PlanStage:
    stage = PlanStage(
        nodes=tuple(str(node) for node in record.items("nodes")),
        ranks=_whole_numbers(record, "ranks", least=0),
        forward_seconds=record.number("forward_seconds"),
        backward_seconds=record.number("backward_seconds"),
        step_seconds=record.number("step_seconds"),
        memory_bytes=_optional(record, "memory_bytes", float),  # type: ignore[arg-type]
        in_flight=_optional(record, "in_flight", int),  # type: ignore[arg-type]
    )
    record.done()
    return stage


def _runner_up(record: Fields) -> RunnerUp:
    other = RunnerUp(
        replicas=_whole_numbers(record, "replicas", least=1),
        num_nodes=_whole_numbers(record, "num_nodes", least=1),
        predicted_step_time=record.number("predicted_step_time"),
        simulated_step_time=_optional(record, "simulated_step_time", float),  # type: ignore[arg-type]
    )
    record.done()
    return other


def _refuse_twice(what: str, values: Sequence[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} stands twice in the plan: expected each once")
        seen.add(value)


def _span(ranks: Sequence[int]) -> str:
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) == 1:
        return str(ranks[0])
    return f"{ranks[0]}-{ranks[-1]}" if whole else f"{len(ranks)} ranks"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
