"""The first difference between two outcomes of one batch, as text."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import Node

from ..guards.rounding import SUMS, by_type

_BELOW_THE_LARGEST = 1e-3  # of the model's largest gradient: smaller ones are compared as if they were this large
_SAMPLES = 8  # of what rounding alone changes
_CHUNK = 1 << 20  # elements, which bounds what is held in float64
_SPREAD = 5.0  # of a gradient that is rounding alone, over the second most that it changed: 3.5 was seen
_LEAST = 1e-4  # smaller values are compared as if this large: rounding alone, as the mean of a LayerNorm
_FEWEST, _SURE = 64, 4.0  # elements that show a standard error; errors that are no chance

_Again = Callable[[Callable[[Mapping[str, torch.Tensor]], None]], object]  # gives gradients of each microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one batch: mean loss, gradients summed over the update groups, buffers after it.

    `outputs` are those of an evaluation before the batch, by flat output and microbatch; None if there was none.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    outputs: Sequence[Sequence[torch.Tensor]] | None


def first_difference(
    plain: Outcome,
    piped: Outcome,
    *,
    tolerance: float,
    stage_of: Mapping[str, str],
    suspects: Mapping[str, str],
    rounding: Callable[[str], float] = lambda _: 0.0,
    summing: Callable[[str], float] = lambda _: 0.0,
    closer: Callable[[Outcome, Outcome, float], tuple[str, str] | None] = lambda *_: None,
) -> str | None:
    """The first difference, from the loss backwards, with its likely cause; None if both agree.

    Arguments:
        tolerance: of the shortest type that the plain module computes in.
        stage_of: text for the stage of a parameter or buffer, by name.
        suspects: by module name, what the module does that a cut may lose; "" is the whole model.
        rounding, summing: see `changed_by_rounding` and `changed_by_order`; only asked if a gradient differs.
        closer: looks once more if nothing differs, as `one_of_many`.
    """
    found = first_apart(plain, piped, tolerance, where="in the pipeline", rounding=rounding, summing=summing)
    found = found or closer(plain, piped, tolerance)
    if found is None:
        return None
    name, what = found
    near = [(module, does) for module, does in suspects.items() if module and f"{name}.".startswith(f"{module}.")]
    others = [one for one in suspects.items() if one not in near]
    listed = [f"module {module!r} {does}" if module else f"the model {does}" for module, does in (*near, *others)]
    cause = (
        f"Likely cause: {'; '.join(listed[:3])}, which the pipeline does not carry out as the plain module does"
        if listed
        else "The modules have no hooks and no state of their own that would explain it; look at a loss or a module "
        "whose result depends on how a batch is cut or on the order of its microbatches, that draws its own random "
        "numbers, or that reads what another one left in an object, an attribute of a tensor or a Python number"
    )
    where = f" ({stage_of[name]})" if name in stage_of else ""
    return (
        f"verify: {what.format(name=f'{name!r}{where}')}. {cause}. Expected the plain module's results: a model as "
        f"nn.Sequential or a list of stages runs your own modules as they are; verify=False trains without this check"
    )


def first_apart(
    plain: Outcome,
    piped: Outcome,
    tolerance: float,
    *,
    where: str,
    rounding: Callable[[str], float] = lambda _: 0.0,
    summing: Callable[[str], float] = lambda _: 0.0,
) -> tuple[str, str] | None:
    """(name of a parameter or buffer, or "", text with {name}) of the first difference; of names that both have."""
    types = [g.dtype for g in plain.gradients.values() if g is not None]
    allowed = max(tolerance, *map(_tolerance, types), 0.0 if types else 1e-3) * max(abs(plain.loss), _LEAST)
    is_close = math.isclose(plain.loss, piped.loss, rel_tol=0.0, abs_tol=allowed)  # as are two of inf
    if not is_close and not (math.isnan(plain.loss) and math.isnan(piped.loss)):
        return "", f"the loss is {piped.loss:.6g}, and {plain.loss:.6g} in the plain module"
    for number, columns in enumerate(zip(plain.outputs or (), piped.outputs or (), strict=False)):
        floor = max(_LEAST, *map(size, columns[0]))
        told = (differs(*pair, tolerance=tolerance, floor=floor) for pair in zip(*columns, strict=True))
        if what := next(filter(None, told), None):
            return "", f"output {number} of an evaluation {what}"
    sizes = [size(g) for g in plain.gradients.values() if g is not None]
    floor = _BELOW_THE_LARGEST * max(sizes, default=0.0)
    for name in reversed([name for name in plain.gradients if name in piped.gradients]):
        expected, given = plain.gradients[name], piped.gradients[name]
        if expected is None and given is not None:
            return name, f"{{name}} has a gradient {where}, and none in the plain module"
        if expected is not None and given is None:
            return name, f"{{name}} has no gradient {where}, and one in the plain module"
        if expected is None or given is None:
            continue
        most = max(tolerance, _tolerance(expected.dtype)) * max(sizes)
        noise = Noise(partial(rounding, name), most, partial(summing, name))
        if what := differs(expected, given, tolerance=tolerance, floor=floor, noise=noise):
            return name, f"the gradient of {{name}} {what}"
    for name, ours in piped.buffers.items():
        what = differs(plain.buffers[name], ours, tolerance=tolerance) if name in plain.buffers else None
        if what:
            return name, f"after the batch, buffer {{name}} {what}"
    return None


def one_of_many(
    plain: Outcome,
    piped: Outcome,
    tolerance: float,
    *,
    rounding: Callable[[str], float],
    count: int,
    losses: Mapping[int, tuple[float, float]],
    sums: Mapping[str, int],
    again: _Again,
) -> tuple[str, str] | None:
    """(name, text) of the first difference as large as one of `count` microbatches, which may be less than rounding.

    `losses`: of both by microbatch, if known; `sums`: by parameter, that a microbatch takes part in, 1 if they are in
    the plain module's order. `again` runs it once more for the gradients of each microbatch, if one differs enough.
    """
    off = {k: abs(theirs - ours) for k, (theirs, ours) in losses.items()}
    usual = max([_LEAST, *(abs(theirs) for theirs, _ in losses.values())])
    others = sorted(off.values(), reverse=True)[1 + len(off) // 8 :]  # where the forward rounds otherwise, many differ
    allowed = tolerance / 4 * usual + 8 * max(others, default=math.inf)
    for k, (theirs, ours) in losses.items():
        if off[k] > allowed:
            return "", f"the loss of microbatch {k} is {ours:.6g}, and {theirs:.6g} in the plain module"
    if off and abs(piped.loss - plain.loss) > 1e-6 * usual + max(off.values()):
        return "", f"the loss is {piped.loss:.6g}, and {plain.loss:.6g} in the plain module, unlike the microbatches'"
    # Where forwards round differently, all elements of a gradient are off alike, about as its loss is.
    least = 0.5 + count * sum(off.values()) / (sum(abs(theirs) for theirs, _ in losses.values()) or 1.0)
    largest = max((size(x) for x in plain.gradients.values() if x is not None), default=0.0)
    doubtful = {
        name: (one, other)
        for name, one in plain.gradients.items()
        if one is not None and (other := piped.gradients.get(name)) is not None
        if one.numel() >= _FEWEST and not (one.is_sparse or one.is_complex())
        if count * sums[name] ** 3 * torch.finfo(one.dtype).eps < 4  # rounding loses one of more
        if 4 * count * size((other := other.to(one.device)) - one) > max(size(one), _BELOW_THE_LARGEST * largest)
    }
    shares = dict.fromkeys(doubtful, 0.0)

    def note(gradients: Mapping[str, torch.Tensor]) -> None:
        for name in doubtful.keys() & gradients.keys():
            shares[name] = max(shares[name], _share(gradients[name], *doubtful[name], count), key=abs)

    for name, (one, _) in doubtful.items():
        note({name: one / count})
    if doubtful:
        again(note)
    for name, pair in reversed(doubtful.items()):
        noise = Noise(partial(rounding, name), tolerance * largest)
        if abs(shares[name]) > least and not noise.explains(*pair):
            return name, f"the gradient of {{name}} differs by about that of one of {count} microbatches"
    return None


def _share(along: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor, count: int) -> float:
    """Share of a gradient (of 1 / (4 count) at least) in a difference, less its error. Rounding has no direction: of n
    elements about 1 / sqrt(n) of it is along a gradient, and their scatter is the error."""
    total = torch.zeros(6, dtype=torch.float64, device=theirs.device)
    for parts in zip(*(torch.split(x.detach().reshape(-1), _CHUNK) for x in (along, theirs, ours)), strict=True):
        g, one, other = (x.double() for x in parts)
        both, square = (other - one) * g, g * g
        total += torch.stack([square.sum(), one @ one, both.sum(), both @ both, both @ square, square @ square])
    squares, whole, sum_, bb, bs, ss = total.tolist()
    squares = max(squares, whole / (4 * count) ** 2) or 1.0
    share = sum_ / squares
    error = math.sqrt(max(bb - 2 * share * bs + share**2 * ss, 0.0)) / squares
    return math.copysign(max(abs(share) - _SURE * error, 0.0), share)


@dataclass(frozen=True)
class Noise:
    """Values that rounding alone may be: on both sides up to `most` and up to `measured()`, which takes a while."""

    measured: Callable[[], float] = float
    most: float = 0.0
    summed: Callable[[], float] = float  # that a difference may be, whatever the values

    def explains(self, *values: torch.Tensor) -> bool:
        largest = max(map(size, values))
        return largest <= self.most and largest <= self.measured()


def changed_by_rounding(
    expected: Mapping[str, torch.Tensor | None],
    sample: Callable[[int], Mapping[str, torch.Tensor | None]],
    *,
    seconds: float,
) -> Callable[[str], float]:
    """Function from a gradient's name to five times the second most that rounding alone changes in an element of it:
    the most may be one flipped ReLU or route.

    Measured when first asked, as in Monte Carlo arithmetic (Parker 1997): by samples 1, 2, ... of the same gradients,
    from weights that are `rounded` once more, up to eight within these seconds. Sample 0 has the same weights; 0.0
    where its gradient is another one.
    """

    @cache
    def measured() -> dict[str, float]:
        begun = time.perf_counter()
        own = {name: x for name, x in expected.items() if x is not None}
        same = {
            name
            for name, x in sample(0).items()
            if x is not None and name in own and torch.equal(x.to_dense(), own[name].to_dense())
        }
        changes: dict[str, list[float]] = {name: [0.0] for name in same}
        for number in range(1, _SAMPLES + 1):
            if (time.perf_counter() - begun) * (number + 1) / number > seconds:
                break
            for name, x in sample(number).items():
                if x is not None and name in same:
                    changes[name].append(size(x - own[name]))
        return {name: _SPREAD * sorted(each)[-2:][0] for name, each in changes.items()}

    return lambda name: measured().get(name, 0.0)


def changed_by_order(run: _Again, count: int) -> Callable[[str], float]:
    """Function from a gradient's name to what its sum over `count` microbatches may be off by in another order: several
    standard errors, also where the sum is far smaller than its parts. Measured when first asked."""

    @cache
    def measured() -> Any:
        found: Any = Counter()
        run(lambda parts: found.update({name: size(x) * torch.finfo(x.dtype).eps for name, x in parts.items()}))
        return found

    return lambda name: math.sqrt(count) / 2 * float(measured()[name])


def rounded(x: torch.Tensor, rounding: float, number: int = 0) -> torch.Tensor:
    """`x`, changed by up to this share: each element by another one, in each numbered sample; not types of one byte."""
    if not rounding or x.itemsize == 1 or not (x.is_floating_point() or x.is_complex()):
        return x
    flat = x.reshape(-1)
    found = torch.empty_like(flat)
    for begin in range(0, len(flat), _CHUNK):
        part = flat[begin : begin + _CHUNK]
        pattern = torch.arange(begin, begin + len(part), dtype=torch.float64, device=x.device).mul_(1e4).add_(number)
        found[begin : begin + _CHUNK] = part * (1 + rounding * pattern.sin_())
    return found.view(x.shape)


def differs(
    theirs: torch.Tensor,
    ours: torch.Tensor,
    *,
    tolerance: float,
    floor: float = 0.0,
    noise: Noise | None = None,
) -> str | None:
    """Text for a difference of two tensors by more than the tolerance of the larger of their largest element and
    `floor`, unless both are `noise`; else None."""
    if theirs.shape != ours.shape:
        return f"has shape {tuple(ours.shape)}, and {tuple(theirs.shape)} in the plain module"
    one, other = (x.detach().cpu().to_dense() if x.is_sparse else x.detach().cpu() for x in (theirs, ours))
    if not (one.is_floating_point() or one.is_complex()):
        return None if torch.equal(one, other) else "is not the plain module's"
    if one.dtype == other.dtype and torch.equal(one, other):  # as nearly always
        return None
    allowed = max(tolerance, _tolerance(one.dtype)) * max(size(one), floor)
    if torch.allclose(other, one.to(other.dtype), rtol=0.0, atol=allowed, equal_nan=True):
        return None
    if not torch.equal(one.isfinite(), other.isfinite()):
        return "has inf or nan in other places than the plain module's"
    apart = size(torch.where(one == other, torch.zeros_like(one), one - other))
    if noise is not None and (apart <= noise.summed() or noise.explains(one, other)):
        return None
    return f"differs from the plain module's by up to {apart:.3g} (largest element there: {size(one):.3g})"


def size(x: torch.Tensor) -> float:
    values = (x.detach().to_dense() if x.is_sparse else x.detach()).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(values.max()) if values.numel() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    """Relative to the largest element of a tensor."""
    return by_type(SUMS, dtype.to_real() if dtype.is_complex else dtype)


def graph_of(tensors: Iterable[torch.Tensor]) -> list[Node]:
    pending = [x.grad_fn for x in tensors]
    found: dict[Node, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = None
            pending += [after for after, _ in node.next_functions]
    return list(found)


def types_of(nodes: Iterable[Node]) -> set[torch.dtype]:
    types = {made.dtype.to_real() for node in nodes for made in node._input_metadata}
    return {dtype for dtype in types if dtype.is_floating_point}


def precision_of(nodes: Iterable[Node]) -> tuple[float, float]:
    """(tolerance, rounding) of the shortest type of the computation: rounding to it may go either way. Rounding is the
    distance of two numbers of it, as a share of them."""
    types = types_of(nodes)
    return max(map(_tolerance, types), default=0.0), max((torch.finfo(each).eps for each in types), default=0.0)


def tolerance_of(nodes: Iterable[Node]) -> float:
    return precision_of(nodes)[0]
