"""Mesh(compress=): which links are packed by which codec, and how many bytes their messages have then.

"int8"                                            boundaries between stages, all of them
{(0, 1): {"topk": 0.01}, "data": {"lowrank": 4}}  that of stages 0 and 1; sums of gradients over data groups
{"pipe": "int8", "data": "int8"}                  all boundaries, and sums
"auto"                                            as far as the step needs it (`auto/compression`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...comm import Codec, Compress, LinkCodecs, TensorSpec
from ...comm.codecs import num_bytes, wire_specs
from ...schedules import MessageKind
from ...schedules.dependencies import Wire
from ..context import Layout
from ..options import AUTO, Settings
from .shapes import Inferred
from .wiring import Mode

Boundary = tuple[int, int]  # stages, the producer's first


def check_compress(compress: Compress, layout: Layout, settings: Settings) -> None:
    """ValueError for what does not go with packed links."""
    place, schedule = layout.place, layout.schedule
    wrong = [
        (max(place.mesh.tensor_sizes) > 1, "beside a tensor group: expected Mesh(tensor=1)"),
        (settings.grad_scaler is not None, "beside a grad_scaler: expected precision='bf16'"),
        (settings.post_validation, "beside post_validation=True: expected Synchronous(post_validation=False)"),
        (AUTO in compress and schedule.is_asynchronous, f"under the asynchronous {schedule.name!r}: expected a codec"),
    ]
    if "data" in compress:
        wrong += [
            (max(map(len, schedule.owners)) == 1, "where no stage has replicas: expected Mesh(data=D)"),
            (not place.world.distributed, "in one process, where replicas share Parameters: expected no 'data'"),
            (schedule.is_asynchronous, f"under the asynchronous {schedule.name!r}: expected '1f1b', or no 'data'"),
            (layout.sharding.is_any, "beside 'zero1' or 'fsdp': expected data_parallel='replicate', or no 'data'"),
            (layout.sync != 1, f"beside sync={layout.sync!r}, which sums no gradients: expected no 'data'"),
        ]
    for is_wrong, why in wrong:
        if is_wrong:
            raise ValueError(f"compress={shown(compress)} {why}, or compress=None")


def shown(compress: Compress) -> str:
    if isinstance(compress, str):
        return repr(compress)
    return "{" + ", ".join(f"{link!r}: {codec}" for link, codec in compress.items()) + "}"


def link_codecs(compress: Compress, mode: Mode, inferred: Inferred) -> LinkCodecs:
    """The codecs of all wires; ValueError for a boundary that does not exist, or that packs nothing."""
    found = LinkCodecs()
    if AUTO not in compress and isinstance(compress, Mapping):  # else measured first
        take_codecs(found, compress, mode, inferred)
    return found


def take_codecs(codecs: LinkCodecs, compress: Mapping[Any, Codec], mode: Mode, inferred: Inferred) -> None:
    """Take these from here on; ValueError as `link_codecs` raises it, and for two codecs of one message."""
    links, chosen = boundaries(mode), dict[Any, Codec]()
    codecs.boundaries.clear()
    codecs.data = compress.get("data")
    for link, codec in compress.items():
        if link == "data":
            continue
        asked = links if link == "pipe" else {link: links.get(link, [])}
        carried = [spec for each in asked.values() for wire in each for spec in _specs(mode, wire, inferred)]
        if not any(len(wire_specs(codec, spec)) > 1 for spec in carried):
            raise ValueError(_nothing_to_pack(link, codec, carried, links))
        wires = [wire for each in asked.values() for wire in each]
        if link == "pipe":
            codecs.boundaries |= {wire[:3]: codec for wire in wires}
            continue
        for wire in wires:
            if chosen.setdefault(wire[:3], codec) != codec:
                raise ValueError(
                    f"compress={{{link!r}: {codec}}}: stages {wire.consumers} stand on one rank, and what goes there "
                    f"goes once, packed as {chosen[wire[:3]]}: expected one codec for all of them"
                )
    codecs.boundaries |= chosen


def packable(mode: Mode, inferred: Inferred) -> list[Wire]:
    """Wires of activations between two ranks, of which something can be packed."""
    wires = dict.fromkeys(wire for each in boundaries(mode).values() for wire in each)
    return [w for w in wires if w.kind is MessageKind.ACT and any(s.requires_grad for s in _specs(mode, w, inferred))]


def boundaries(mode: Mode) -> dict[Boundary, list[Wire]]:
    """Wires between two ranks, by producer and consumer: one that has several consumers by each of them."""
    owners, found = mode.schedule.owners, dict[Boundary, list[Wire]]()
    for wire in mode.wires:
        for consumer in wire.consumers if owners[wire.src] != owners[wire.dst] else ():
            found.setdefault((wire.producer, consumer), []).append(wire)
    return found


def message_bytes(mode: Mode, inferred: Inferred, codecs: LinkCodecs | None) -> tuple[list[float], list[float]]:
    """Bytes of a microbatch's activations and gradients over each edge of the schedule, as `Links` takes them."""

    def size(kind: MessageKind, edge: Boundary) -> Iterator[int]:
        for wire in mode.wires:
            if wire.kind is kind and wire.producer == edge[0] and edge[1] in wire.consumers:
                codec = None if codecs is None else codecs.of(wire.message(0))
                specs = _specs(mode, wire, inferred)
                yield sum(num_bytes([spec] if codec is None else wire_specs(codec, spec)) for spec in specs)

    edges = [edge[:2] for edge in mode.schedule.stage_edges]
    acts, grads = ([float(sum(size(kind, edge))) for edge in edges] for kind in (MessageKind.ACT, MessageKind.GRAD))
    return acts, grads


def _specs(mode: Mode, wire: Wire, inferred: Inferred) -> list[TensorSpec]:
    return mode.message_specs(wire.message(0), inferred)


def _nothing_to_pack(link: object, codec: Codec, carried: list[TensorSpec], links: Mapping[Boundary, object]) -> str:
    if not carried:
        known = ", ".join(map(str, links)) or "none"
        return f"compress={{{link!r}: {codec}}}: no message goes there. Boundaries between ranks are {known}"
    kinds = ", ".join(dict.fromkeys(f"{spec.dtype} {list(spec.shape)}" for spec in carried))
    return (
        f"compress={{{link!r}: {codec}}}: nothing there becomes smaller, since what goes there is {kinds}. Expected a "
        f"boundary with floating tensors that get gradients, or compress= without it"
    )
