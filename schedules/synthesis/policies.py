"""Search among the policies of list scheduling: a spread of first ones, then small changes of the better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from random import Random

from .listing import Policy
from .problem import SPLIT_OPS, Problem

_AHEAD = (1.0, 2.0, 1.5, 2.25, 3.0)  # forwards ahead of their I, in stages until the end
_BACKLOG = (1.0, None, 0.0, 2.0, 3.0)  # W put off, in ranks before this one; None: any number
_FILL = (1.0, 0.7, 0.4, 0.0)
_SHIFT = (0, -1)  # forwards more than that
_DUE = (None, 0.0)
_FEW = 12  # policies of the first handful


def first_policies(problem: Problem, random: Random) -> Iterator[Policy]:
    """A spread of policies that do well with equal stages, the most common ones first."""
    has_chunks = problem.num_stages > problem.num_ranks
    shifts, dues = (_SHIFT, _DUE) if has_chunks else (_SHIFT[:1], _DUE[:1])
    grid = list(product(_AHEAD, _BACKLOG, _FILL, shifts, dues, (False, True), (0.0, 0.5)))
    few = [each for each in grid if each[2] == 1.0 and not each[5] and not each[6]][:_FEW]
    rest = [each for each in grid if each not in few]
    random.shuffle(rest)
    P, S, M = problem.num_ranks, problem.num_stages, problem.num_microbatches
    sequences = cycle(_sequences(problem))
    for ahead, backlog, fill, shift, due, forward_first, patience in [*few, *rest]:
        most = [max(1, min(M, int(ahead * (S - 1 - s) * P / S + 1) + shift)) for s in range(S)]
        put_off = [M * S // P if backlog is None else int(backlog * rank) for rank in range(P)]
        yield Policy(
            ahead=tuple(most),
            backlog=tuple(put_off),
            fill=(fill,) * P,
            patience=patience,
            forward_first=forward_first,
            due=due,
            sequence=next(sequences),
        )


def _sequences(problem: Problem) -> list[tuple[int, ...] | None]:
    """Orders in which microbatches that differ may enter: as they come, the longest first, the shortest first."""
    if problem.same_microbatches:
        return [None]
    M = problem.num_microbatches
    work = [sum(problem.seconds(op)[s][k] for op in SPLIT_OPS for s in range(problem.num_stages)) for k in range(M)]
    rising = sorted(range(M), key=work.__getitem__)
    return [tuple(range(M)), tuple(rising), tuple(reversed(rising))]


def changed(policy: Policy, problem: Problem, random: Random) -> Policy:
    """The policy with one change, or a few."""
    for _ in range(1 + int(random.random() * 2)):
        policy = _change(policy, problem, random)
    return policy


def _change(policy: Policy, problem: Problem, random: Random) -> Policy:
    M = problem.num_microbatches
    if policy.sequence is not None and random.random() < 0.5:
        sequence = list(policy.sequence)
        sequence.insert(random.randrange(M), sequence.pop(random.randrange(M)))
        return replace(policy, sequence=tuple(sequence))
    kind = random.random()
    if kind < 0.5:  # how far the stages of one chunk run ahead
        chunk = random.randrange(max(map(len, problem.placement)))
        stages = [own[chunk] for own in problem.placement if chunk < len(own)]
        change = _line(len(stages), random)
        ahead = list(policy.ahead)
        for stage, more in zip(stages, change, strict=True):
            ahead[stage] = max(1, min(M, ahead[stage] + more))
        return replace(policy, ahead=tuple(ahead))
    if kind < 0.9:
        fill, backlog = changed_weights(policy.fill, policy.backlog, problem, random)
        return replace(policy, fill=fill, backlog=backlog)
    if kind < 0.94:
        return replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75)))
    if kind < 0.97:
        return replace(policy, forward_first=not policy.forward_first)
    return replace(policy, due=random.choice((None, -0.2, 0.0, 0.2, 0.5, 1.0)))


def changed_weights(
    fill: tuple[float, ...], backlog: tuple[int, ...], problem: Problem, random: Random
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The gaps that W go into and the W that wait, by rank, with one change."""
    P = problem.num_ranks
    if random.random() < 0.5:
        most = problem.num_microbatches * problem.num_stages // P
        change = _line(P, random)
        return fill, tuple(max(0, min(most, old + more)) for old, more in zip(backlog, change, strict=True))
    part = random.choice((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    if random.random() < 0.3:
        return (part,) * P, backlog
    low, high = sorted(random.randrange(P) for _ in range(2))
    return (*fill[:low], *(part,) * (high + 1 - low), *fill[high + 1 :]), backlog


def _line(number: int, random: Random) -> list[int]:
    """Whole numbers along the ranks: one alone, some neighbours, or a slope."""
    step = random.choice((-1, 1)) * (1 if random.random() < 0.6 else 1 + int(random.random() * 4))
    kind = random.random()
    if kind < 0.4:
        low = high = random.randrange(number)
    else:
        low, high = sorted(random.randrange(number) for _ in range(2))
    if kind < 0.7:
        return [step if low <= at <= high else 0 for at in range(number)]
    last = max(1, number - 1)
    rising = random.random() < 0.5
    return [round(step * (at if rising else last - at) / last) for at in range(number)]
