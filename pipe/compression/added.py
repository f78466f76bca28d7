"""Mesh(compress=) as an addition to a run: packing transports and sums, and the choice of codecs for links.

Under "auto" links are packed only where it shortens the step:

a few steps  unpacked, to measure actions; then the speed of the links between ranks, unless the user has given it
rank 0       up the ladder for the boundary with most of the bytes on the simulated step's critical path, as long as the
             step gets shorter by at least WORTH; then down again wherever the step does not get longer
together     the same codecs on every rank, from the next step on

Packing is not exact, and its effect on the loss is not known ahead. Under "auto" sums over data groups are not packed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any

import torch

from ...comm import Codec, Collectives, LinkCodecs, LinkName, PackingTransport, TensorSpec
from ...comm.buckets import BucketSum
from ...comm.codecs import exact_type, num_bytes, orthonormal, pack, product, start_matrix, unpack, wire_specs
from ...comm.links import fit_line, ping_pong
from ...schedules import Costs, Link, Links, Message, MessageKind, critical_path, simulate
from ...schedules.dependencies import Wire
from ...schedules.messages import STAGE_KINDS
from ...schedules.timing.links import Network
from ..addition import Addition, BeginSum
from ..context import Run
from ..run.ranks import RankLinks
from ..run.training import Training
from ..settings.arguments import AUTO
from ..settings.excludes import shown
from ..settings.given import Given
from ..stage.shapes import Inferred
from ..stage.wiring import Mode, message_bytes
from ..telling import tell

Boundary = tuple[int, int]  # stages, the producer's first
Chosen = dict[Boundary, Codec]

LADDER = (None, Codec("int8"))  # effects of others on the loss: experiments/results/slow-links
WORTH = 0.05  # of the step, for which one more rung is taken
STEPS = 5  # measured ones
_SMALL, _TIMED, _ROUNDS = 1024, 3, 5


def take_codecs(codecs: LinkCodecs, compress: Mapping[Any, Codec], mode: Mode, inferred: Inferred) -> None:
    """Use these codecs; ValueError for a boundary that does not exist, that packs nothing, or packs twice."""
    links, named = boundaries(mode), dict[Any, Codec]()
    codecs.boundaries, codecs.data = {}, compress.get("data")
    for link, codec in compress.items():
        if link == "data":
            continue
        wires = list(dict.fromkeys(chain(*links.values()))) if link == "pipe" else links.get(link, [])
        carried = [spec for wire in wires for spec in mode.message_specs(wire.message(0), inferred)]
        if not any(len(wire_specs(codec, spec)) > 1 for spec in carried):
            raise ValueError(f"compress={{{link!r}: {codec}}}: {_nothing_to_pack(carried, links)}")
        for wire in wires:
            if (codecs.boundaries if link == "pipe" else named).setdefault(wire[:3], codec) != codec:
                raise ValueError(
                    f"compress={{{link!r}: {codec}}}: stages {wire.consumers} are on one rank, and get one message, "
                    f"packed as {named[wire[:3]]}: expected one codec for all of them"
                )
    codecs.boundaries |= named


def boundaries(mode: Mode) -> dict[Boundary, list[Wire]]:
    """Wires between two ranks, by producer and consumer: a wire with several consumers is listed for each."""
    owners, found = mode.schedule.owners, dict[Boundary, list[Wire]]()
    for wire in mode.wires:
        for consumer in wire.consumers if owners[wire.src] != owners[wire.dst] else ():
            found.setdefault((wire.producer, consumer), []).append(wire)
    return found


def _nothing_to_pack(carried: list[TensorSpec], links: Mapping[Boundary, object]) -> str:
    if not carried:
        return f"no message is sent there. Boundaries between ranks are {', '.join(map(str, links)) or 'none'}"
    kinds = ", ".join(dict.fromkeys(f"{spec.dtype} {list(spec.shape)}" for spec in carried))
    return (
        f"nothing there becomes smaller, since messages there are {kinds}. Expected a boundary with floating tensors "
        f"that get gradients, or compress= without it"
    )


def choose(
    links: list[Boundary],
    seconds: Callable[[Chosen], tuple[float, Mapping[Boundary, float]]],
    ladder: Sequence[Codec | None] = LADDER,
) -> Chosen:
    """Codecs of these boundaries. `seconds`: of a step with such codecs, and those for which bytes of each boundary are
    on its critical path."""
    rungs = dict.fromkeys(links, 0)

    def at(tried: Mapping[Boundary, int]) -> Chosen:
        return {link: codec for link, rung in tried.items() if (codec := ladder[rung]) is not None}

    (step, path), tried = seconds({}), dict(rungs)
    while True:
        # Where paths are equally long, each must become shorter before the step does: so a rung of all is tried.
        able = [each for each in links if tried[each] == rungs[each] < len(ladder) - 1 and path.get(each)]
        if not able:
            break
        tried[max(able, key=lambda link: path[link])] += 1
        found, path = seconds(at(tried))
        if found < (1 - WORTH) * step:
            step, rungs = found, dict(tried)
    for link in sorted(links, key=lambda link: -rungs[link]):
        while rungs[link] and seconds(at(lower := rungs | {link: rungs[link] - 1}))[0] <= step * (1 + 1e-3):
            rungs = lower
    return at(rungs)


def step_seconds(
    mode: Mode, inferred: Inferred, costs: Costs, network: Network, busy: Callable[[Boundary, Codec], float]
) -> Callable[[Chosen], tuple[float, Mapping[Boundary, float]]]:
    """`seconds` for `choose`, by simulating. `busy`: seconds of a boundary's ranks together for packing and unpacking a
    message [s]."""

    def seconds(chosen: Chosen) -> tuple[float, Mapping[Boundary, float]]:
        codecs, overhead = LinkCodecs(), [0.0] * mode.schedule.num_stages
        take_codecs(codecs, chosen, mode, inferred)
        for link, codec in chosen.items():  # half at either end, before or after an action
            for stage in link:
                overhead[stage] += busy(link, codec) / 2
        (acts, grads), edges = message_bytes(mode, inferred, codecs.layouts), [e[:2] for e in mode.schedule.stage_edges]
        links = Links(network=network, activation_bytes=acts, gradient_bytes=grads)
        timeline = simulate(mode.schedule, replace(costs, message_overhead=overhead), links)
        path: dict[Boundary, float] = {}
        for each in critical_path(timeline).steps:
            if isinstance(each.what, Message) and each.what.kind in STAGE_KINDS and each.sender is not None:
                ends, is_act = (each.what.src, each.what.dst), each.what.kind is MessageKind.ACT
                link = ends if is_act else ends[::-1]
                num_bytes_sent = (acts if is_act else grads)[edges.index(link)]
                rate = links.way(each.sender, each.rank).seconds_per_byte
                path[link] = path.get(link, 0.0) + num_bytes_sent * rate
        return timeline.makespan, path

    return seconds


def decides(
    run: Run,
    mode: Mode,
    inferred: Inferred,
    ranks: RankLinks,
    training: Training,
    *,
    codecs: LinkCodecs,
    costs: Callable[[], Costs],
) -> None:
    begun, before = iter(range(STEPS + 1)), training.before_step
    specs: dict[Boundary, list[TensorSpec]] = {}  # of activations that every codec can pack
    for wire in dict.fromkeys(chain(*boundaries(mode).values())):
        carried = mode.message_specs(wire.message(0), inferred)
        if wire.kind is MessageKind.ACT and any(all(len(wire_specs(c, s)) > 1 for c in LADDER if c) for s in carried):
            specs[wire.producer, wire.consumers[0]] = carried

    def busy(link: Boundary, codec: Codec) -> float:  # [s] to pack and unpack one message
        found = 0.0
        for spec in (each for each in specs[link] if len(wire_specs(codec, each)) > 1):
            x = torch.linspace(-1.0, 1.0, prod(spec.shape)).view(spec.shape).to(run.options.device, spec.dtype)
            times = []
            for _ in range(_TIMED):
                start = time.perf_counter()
                unpack(codec, pack(codec, x, None)[0], spec)
                times.append(time.perf_counter() - start)
            found += statistics.median(times)
        return found

    compress = run.options.compress
    stated = compress[AUTO] if isinstance(compress, Mapping) else None
    if stated is not None:  # ValueError for a link that it lacks
        step_seconds(mode, inferred, Costs(), stated, busy)({})

    def decide(given: Given, step: int, reads_nothing: bool) -> None:
        before(given, step, reads_nothing)
        if next(begun, None) != STEPS:
            return
        measured, network = costs(), _measured(run, ranks, specs) if stated is None else stated
        with run.guard.together():
            found = {}
            if run.collectives.rank == 0:
                free = replace(measured, latency=0.0)
                found = choose(list(specs), step_seconds(mode, inferred, free, network, cache(busy)))
            found = run.collectives.gather(found, what="choosing codecs for links")[0]
        take_codecs(codecs, found, mode, inferred)
        tell(f"compress='auto': {shown(found) if found else 'nothing'} is packed", rank=run.collectives.rank)

    training.before_step = decide


def _measured(run: Run, ranks: RankLinks, specs: Mapping[Boundary, list[TensorSpec]]) -> Network:
    """The links between ranks that send each other messages. Collective over the processes."""
    transport, device = next(iter(ranks.transports.values())), run.options.device
    if run.collectives.alone or not specs:
        return Link()
    sizes = _SMALL, max(8 * _SMALL, *map(num_bytes, specs.values()))
    found: dict[tuple[int, int], Link] = {}
    for pair in sorted((a, b) for a, b in ranks.between if a < b and (b, a) in ranks.between):
        measure = partial(ping_pong, device=device, timeout=run.options.timeout, pair=pair, rounds=_ROUNDS)
        mine = [measure(transport, [TensorSpec((size,), (1,), torch.uint8, False)]).seconds for size in sizes]
        line = fit_line(sizes, run.collectives.gather_ranks(mine, what="measuring the links between ranks")[pair[0]])
        found |= dict.fromkeys((pair, pair[::-1]), Link(latency=line.latency, seconds_per_byte=1 / line.bandwidth))
    return {link: found.get(link, Link()) for link in ranks.between}  # messages in one direction only are never packed


class Compression(Addition):
    """Packed links of a run, for stages with this wiring. Raises ValueError for a boundary that does not exist, that
    packs nothing, or that packs twice."""

    def __init__(self, run: Run, mode: Mode, inferred: Inferred) -> None:
        self._run, self._mode, self._inferred = run, mode, inferred
        self.codecs = LinkCodecs()
        compress = run.options.compress
        if isinstance(compress, Mapping) and AUTO not in compress:  # else it is measured first
            take_codecs(self.codecs, compress, mode, inferred)

    @property
    def sent(self) -> Mapping[LinkName, tuple[int, int]]:  # type: ignore[override]
        return self.codecs.sent

    def connected(self, pipeline: Any, links: RankLinks) -> None:
        """Pack the training engine's messages; under "auto" after its first steps are measured."""
        engine, compress = pipeline.engine, self._run.options.compress
        engine.ranks = [
            replace(local, transport=PackingTransport(local.transport, self.codecs)) for local in engine.ranks
        ]
        if compress is not None and AUTO in compress:
            training, costs = pipeline.training, pipeline.measurement.costs
            decides(self._run, self._mode, self._inferred, links, training, codecs=self.codecs, costs=costs)

    @property
    def sums(self) -> BeginSum | None:  # type: ignore[override]
        is_on = self.codecs.data is not None and not self.codecs.is_paused
        return partial(begin_packed_sum, self.codecs) if is_on else None

    def exact(self) -> AbstractContextManager[object]:
        return self.codecs.paused()

    def loaded(self) -> None:
        self.codecs.memory.clear()

    def lost(self) -> str | None:
        if not self.codecs.remember:
            return None
        return "it has no memory of what compress= had left out on links, which begin again"


def begin_packed_sum(
    codecs: LinkCodecs, named: Mapping[str, torch.Tensor], collectives: Collectives, *, ranks: Sequence[int], what: str
) -> Callable[[], list[torch.Tensor]]:
    """Begin to sum these tensors over ranks, packed; the returned function waits, and returns the sums, the same on
    all.

    "lowrank": M of each rank, plus its memory, as in PowerSGD: P = sum of M Q, orthonormal; then Q = sum of M^T P, and
    the sum is P Q^T; each keeps the error of its mean. Else all exchange packed tensors. Others are sent unpacked.
    """
    codec, count = codecs.data, len(ranks)
    assert codec is not None
    whole = [x.detach().flatten(1) if x.dim() > 1 else x.detach() for x in named.values()]
    specs = [TensorSpec.of(x)._replace(requires_grad=True) for x in whole]
    keys = ["data" + name if len(wire_specs(codec, x)) > 1 else "" for name, x in zip(named, specs, strict=True)]
    memory, num_whole = codecs.memory, 2 * (count - 1) * num_bytes(specs) // count

    def begin(tensors: Sequence[torch.Tensor], replaced: int) -> Callable[[], list[torch.Tensor]]:
        # `replaced`: bytes that the same sums take unpacked; a ring sends 2 (count - 1) / count of a tensor
        total = BucketSum(tensors, collectives, what=what, ranks=ranks)
        total.leave_all(tensors)
        codecs.count("data", 2 * (count - 1) * total.num_bytes // count, replaced)
        return total.wait

    if codec.kind == "lowrank":
        exact = {i: whole[i].to(exact_type(whole[i].dtype)) for i, key in enumerate(keys) if key}
        owed = {i: x + memory.get(keys[i], 0.0) for i, x in exact.items()}
        starts = {i: memory.get("start" + keys[i], start_matrix(x, int(codec.level))) for i, x in owed.items()}
        first = begin([product(owed[i], starts[i]) if i in owed else x for i, x in enumerate(whole)], num_whole)

        def finish() -> list[torch.Tensor]:
            sums = first()
            lefts = {i: orthonormal(sums[i]) for i in owed}
            rights = begin([product(x.T, lefts[i]) for i, x in owed.items()], 0)()
            for (i, x), right in zip(owed.items(), rights, strict=True):
                sums[i] = product(lefts[i], right.T)
                memory[keys[i]] = (x - sums[i] / count).nan_to_num_(0.0, 0.0, 0.0)
                memory["start" + keys[i]] = orthonormal(right)
            return [total.to(x.dtype).view_as(x) for total, x in zip(sums, named.values(), strict=True)]

        return finish
    packed: list[torch.Tensor] = []
    for key, x in zip(keys, whole, strict=True):
        packed += codecs.pack(codec, x, key) if key else [x.contiguous()]
    mine = torch.cat([x.view(-1).view(torch.uint8) for x in packed])
    wait = collectives.exchange([[mine]] * count, [len(mine)] * count, what=what, ranks=ranks)
    codecs.count("data", (count - 1) * len(mine), num_whole)

    def add() -> list[torch.Tensor]:
        sums = [torch.zeros_like(x) for x in named.values()]
        for bytes_of_one in wait():
            parts = torch.split(bytes_of_one if len(bytes_of_one) else mine, [x.nbytes for x in packed])
            rest = iter([part.clone().view(x.dtype) for part, x in zip(parts, packed, strict=True)])
            for total, spec in zip(sums, specs, strict=True):
                found = tuple(next(rest) for _ in wire_specs(codec, spec))
                total += (found[0] if len(found) == 1 else unpack(codec, found, spec)).view_as(total)
        return sums

    return add
