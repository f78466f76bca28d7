"""Mesh(compress=): which links are packed by which codec, and how many bytes their messages have then."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
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


def take_codecs(codecs: LinkCodecs, compress: Mapping[Any, Codec], mode: Mode, inferred: Inferred) -> None:
    """Take these from here on; ValueError for a boundary that does not exist, that packs nothing, or packs twice."""
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
                    f"compress={{{link!r}: {codec}}}: stages {wire.consumers} stand on one rank, and what goes there "
                    f"goes once, packed as {named[wire[:3]]}: expected one codec for all of them"
                )
    codecs.boundaries |= named


def boundaries(mode: Mode) -> dict[Boundary, list[Wire]]:
    """Wires between two ranks, by producer and consumer: one that has several consumers by each of them."""
    owners, found = mode.schedule.owners, dict[Boundary, list[Wire]]()
    for wire in mode.wires:
        for consumer in wire.consumers if owners[wire.src] != owners[wire.dst] else ():
            found.setdefault((wire.producer, consumer), []).append(wire)
    return found


def message_bytes(mode: Mode, inferred: Inferred, codecs: LinkCodecs | None) -> tuple[list[float], list[float]]:
    """Bytes of a microbatch's activations and gradients over each edge of the schedule, as `Links` takes them."""

    sizes: dict[tuple[MessageKind, int, int], float] = {}
    for wire in mode.wires:
        message, specs = wire.message(0), mode.message_specs(wire.message(0), inferred)
        size = float(num_bytes(specs if codecs is None else codecs.layouts(message, specs)))
        sizes |= {(wire.kind, wire.producer, consumer): size for consumer in wire.consumers}
    acts, grads = (
        [sizes.get((kind, src, dst), 0.0) for src, dst, _ in mode.schedule.stage_edges]
        for kind in (MessageKind.ACT, MessageKind.GRAD)
    )
    return acts, grads


def _nothing_to_pack(carried: list[TensorSpec], links: Mapping[Boundary, object]) -> str:
    if not carried:
        return f"no message goes there. Boundaries between ranks are {', '.join(map(str, links)) or 'none'}"
    kinds = ", ".join(dict.fromkeys(f"{spec.dtype} {list(spec.shape)}" for spec in carried))
    return (
        f"nothing there becomes smaller, since what goes there is {kinds}. Expected a boundary with floating tensors "
        f"that get gradients, or compress= without it"
    )
