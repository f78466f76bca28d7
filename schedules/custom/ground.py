"""Rules made concrete: the actions of a problem, their data dependencies, and the relations and limits of each rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any

from ..dependencies import Dependencies
from ..ir import LAST_USES, Action, Op, Relation, Schedule, ScheduleError
from .notation import Filter, InFlight, InOrder, OnlyIf, Predicate, Rule, check_number

EXPECTED = (
    "expected a function of stage and microbatch that returns relations, such as "
    "lambda s, m: B(s, m).after(F(s, m + 2)), or in_order(...), in_flight(...), only_if(...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundRule:
    """A rule under the user's name for it, with its relations between actions; `limits`: stage activations at once,
    by rank."""

    name: str
    relations: tuple[Relation, ...] = ()
    limits: Mapping[int, int] = field(default_factory=dict)
    allows: Filter | None = None


class Ground:
    """The actions of a problem: in `schedule` on their ranks, in no order; by action its `rank`, and its `needs`."""

    def __init__(self, skeleton: Schedule, *, split_backward: bool) -> None:
        backward = (Op.I, Op.W) if split_backward else (Op.B,)
        programs: list[list[Action]] = [[] for _ in skeleton.placement]
        for stage in range(skeleton.num_stages):
            for k in range(skeleton.total_indices):
                rank = skeleton.owner(stage, k)
                ops = (Op.F, *backward) if skeleton.trains(stage) else (Op.F,)
                programs[rank] += (Action(stage, op, k) for op in ops)
        filled = replace(skeleton, programs=tuple(map(tuple, programs)), overlapped=())
        self.updates = not filled.has_epilogue
        if self.updates:
            shared = [stage for stage, ranks in enumerate(skeleton.owners) if len(ranks) > 1]
            if shared:
                raise ScheduleError(
                    f"stage {shared[0]} is on the ranks {skeleton.owners[shared[0]]}, each of which updates it: "
                    f"expected one rank per stage where batches overlap"
                )
            groups = range(skeleton.num_batches * skeleton.groups_per_batch)
            for rank, stages in enumerate(skeleton.placement):
                programs[rank] += (Action(stage, Op.U, g) for stage in stages for g in groups)
            filled = replace(filled, programs=tuple(map(tuple, programs)))
        self.schedule = filled
        self.split_backward = split_backward
        self.rank = {action: rank for rank, program in enumerate(programs) for action in program}
        needs = Dependencies(filled)
        self.needs = {action: needs.of(action) for action in self.rank}
        if self.updates:
            self._add_updates()

    def _add_updates(self) -> None:
        """An update needs the gradients that it applies; where the rule names versions by the batch, a forward needs
        the update that makes its version."""
        rule, size, M = self.schedule.rule, self.schedule.group_size, self.schedule.num_microbatches
        for stage, op, index in list(self.rank):
            if op in LAST_USES:
                self.needs[Action(stage, Op.U, index // size)].append(Action(stage, op, index))
            elif op is Op.U and index:
                self.needs[Action(stage, op, index)].append(Action(stage, op, index - 1))
            elif op is Op.F and rule.most_versions is not None:
                version = rule.version(index, M, 0, 0)
                if version > 0:
                    self.needs[Action(stage, op, index)].append(Action(stage, Op.U, version - 1))

    def by_microbatch(self, action: Action) -> tuple[int, int]:
        """Sort key by microbatch, then slice: forwards ascending, backwards descending."""
        microbatch, piece = divmod(action.index, self.schedule.num_slices)
        return microbatch, piece if action.op is Op.F else -piece

    def check_op(self, action: Action, words: str) -> None:
        """ValueError if no action of this op exists, for any stage and microbatch."""
        op = action.op
        if op in (Op.I, Op.W) and not self.split_backward:
            why = "its backward is whole (B): expected B, or Constraints(..., split_backward=True)"
        elif op is Op.B and self.split_backward:
            why = "its backward is split: expected I and W in place of B, or split_backward=False"
        elif op is Op.U and not self.updates:
            why = "only asynchronous schedules have updates in their order: expected F B I W"
        elif op not in (Op.F, Op.B, Op.I, Op.W, Op.U):
            why = "rules speak of F B I W U"
        else:
            return
        raise ValueError(f"rule {words!r} speaks of {action}, which the schedule does not have: {why}")


def ground_rules(ground: Ground, rules: Sequence[Rule] | Mapping[str, Rule]) -> list[GroundRule]:
    """Each rule with its actions; ValueError for a rule that is invalid, raises, or matches no actions."""
    if isinstance(rules, Mapping):
        named: list[tuple[str | None, Rule]] = [(str(name), rule) for name, rule in rules.items()]
    elif isinstance(rules, list | tuple):
        named = [(None, rule) for rule in rules]
    else:
        hint = f" (rules=[{getattr(rules, '__name__', 'rule')}])" if callable(rules) else ""
        raise ValueError(f"rules={rules!r:.60}: expected a list of rules, or a dict from words to rules{hint}")
    return [_ground(ground, rule, name, number) for number, (name, rule) in enumerate(named)]


def _ground(ground: Ground, rule: Any, name: str | None, number: int) -> GroundRule:
    at = f"rules[{number}]"
    match rule:
        case InFlight():
            words = name or f"{at}, in_flight"
            limits = {r: _at(r, rule.at_most, words, least=1) for r in range(ground.schedule.num_ranks)}
            return GroundRule(name=words, limits=limits)
        case OnlyIf():
            return GroundRule(name=name or _words_of(rule.allows, f"{at}, only_if"), allows=rule.allows)
        case InOrder():
            words = name or f"{at}, in_order({', '.join(op.value for op in rule.ops)})"
            return GroundRule(name=words, relations=tuple(_neighbours(_orders(ground, rule, words))))
        case Relation():
            words = name or f"{at}, {rule}"
            found = [rule]
        case _ if callable(rule) and not isinstance(rule, type | Op):
            words = name or _words_of(rule, at)
            found = list(_relations(ground, rule, words))
        case _:
            raise ValueError(f"{name or at} is {rule!r:.60}: {EXPECTED}")
    for relation in found:
        _check_relation(ground, relation, words)
    there = [each for each in found if each.first in ground.rank and each.then in ground.rank]
    if not there:
        _refuse_typos(ground, found, words)
    return GroundRule(name=words, relations=tuple(dict.fromkeys(there)))


def _at(rank: int, given: int | Callable[[int], int], words: str, *, least: int) -> int:
    number = _called(words, partial(given, rank), f" on rank {rank}") if callable(given) else given
    return check_number(number, f"rule {words!r} on rank {rank} (", least=least)


def _refuse_typos(ground: Ground, found: Sequence[Relation], words: str) -> None:
    """ValueError for a rule that matches no two actions, unless up to two more microbatches per stage would change
    that."""
    stages, microbatches = ground.schedule.num_stages, ground.schedule.total_indices
    if stages == 1:
        return
    if not found and microbatches > 1:
        raise ValueError(
            f"rule {words!r} returns no relation for any of the {stages} stages and {microbatches} microbatches: "
            f"expected one for some, or leave the rule out"
        )
    near = range(-2 * stages, microbatches + 2 * stages)
    if found and not any(all(a.stage in range(stages) and a.index in near for a in each) for each in found):
        lacking = next(action for action in found[0] if action not in ground.rank)
        raise ValueError(
            f"rule {words!r} matches no two actions: in {str(found[0])!r}, {lacking} does not exist, and so on; "
            f"expected stages 0..{stages - 1} and microbatches 0..{microbatches - 1} for some of them"
        )


def _check_relation(ground: Ground, relation: Relation, words: str) -> None:
    for action in relation:
        if not isinstance(action, Action):
            raise ValueError(f"rule {words!r} relates {action!r:.40}: expected actions, as in F(s, m).before(B(s, m))")
        ground.check_op(action, words)
    if relation.first == relation.then:
        raise ValueError(f"rule {words!r} puts {relation.first} before itself: expected two different actions")


def _orders(ground: Ground, rule: InOrder, words: str) -> list[list[list[list[Action]]]]:
    """By rank its orders, of all its actions of some ops by the key, or of each stage; actions of equal keys are
    grouped."""
    for op in rule.ops:
        ground.check_op(Action(0, op, 0), words)
    place = {op: at for at, op in enumerate(rule.ops)}

    def key_of(action: Action) -> Any:
        if rule.key is None:
            return ground.by_microbatch(action), place[action.op]
        given = (action.stage, action.index) if len(rule.ops) == 1 else (action.op, action.stage, action.index)
        return _called(words, partial(rule.key, *given), f" at {action}")

    orders = []
    for program in ground.schedule.programs:
        keys = {action: key_of(action) for action in program if action.op in place}
        stages = [{s} for s in sorted({a.stage for a in keys})] if rule.key is None else [{a.stage for a in keys}]
        own = [[action for action in keys if action.stage in together] for together in stages]
        in_order = [_called(words, partial(sorted, each, key=keys.__getitem__)) for each in own]
        orders.append([[list(equal) for _, equal in groupby(each, key=keys.__getitem__)] for each in in_order])
    return orders


def _neighbours(orders: Iterable[list[list[list[Action]]]]) -> Iterator[Relation]:
    for groups in chain.from_iterable(orders):
        for earlier, later in pairwise(groups):
            for first in earlier:
                for then in later:
                    yield first.before(then)


def _relations(ground: Ground, rule: Predicate, words: str) -> Iterator[Relation]:
    try:
        inspect.signature(rule).bind(0, 0)
    except TypeError:
        raise ValueError(
            f"rule {words!r} takes {inspect.signature(rule)}: expected a function of two numbers, stage and microbatch"
        ) from None
    except ValueError:  # written in C, without a signature
        pass
    for stage in range(ground.schedule.num_stages):
        for k in range(ground.schedule.total_indices):
            made = _called(words, partial(_listed, rule, stage, k), f" at stage {stage}, microbatch {k}")
            for each in made:
                if not isinstance(each, Relation):
                    hint = "; for `<` write before()" if isinstance(each, bool) else ""
                    raise ValueError(
                        f"rule {words!r} returns {each!r:.60} for stage {stage}, microbatch {k}: expected a relation "
                        f"such as F(s, m).before(B(s, m)), several of them, or None{hint}"
                    )
                yield each


def _listed(rule: Predicate, stage: int, index: int) -> list[Any]:
    made: Any = rule(stage, index)
    if made is None:
        return []
    if isinstance(made, Relation | Action | str) or not isinstance(made, Iterable):
        return [made]
    return list(made)


def _called(words: str, make: Callable[[], Any], at: str = "") -> Any:
    """Value of the user's code; an exception becomes a ValueError that names the rule."""
    try:
        return make()
    except Exception as error:
        raise ValueError(f"rule {words!r} fails{at}: {type(error).__name__}: {error}") from error


def _words_of(function: Callable[..., Any], otherwise: str) -> str:
    """The first line of its docstring, else its name; `otherwise` for a lambda."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else None
    name = getattr(function, "__name__", otherwise)
    if text:
        return text.splitlines()[0].rstrip(".")
    return f"{otherwise}, a lambda" if name == "<lambda>" else name
