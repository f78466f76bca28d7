"""Costs of each part of a model: the input of the partitioner."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

from ..schedules.slice_lengths import CausalSeconds
from .memory import MemoryUse
from .stage_cost import Rounds
from .strict import check_figures, count, fail, number, parse_object, printable, read_text

_JSON_VERSION = 1
ORIGINS = ("measured", "published", "formula")
ON = "samples on"
SAMPLES = ("samples", ON)
SPLITS = ("any", "divided", "whole", *SAMPLES)  # of a node over a tensor group
Tied = tuple[tuple[str, ...], float]  # two nodes or more, bytes of the weights that all of them share
_PAIRS = [(f"{kind}_bytes", f"{kind}_seconds") for kind in ("selective", "keep_less")]  # both or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One part of a model that is never cut. All figures are of one microbatch on the profile's device.

    Arguments:
        name: unique in the profile.
        description: for people.
        forward_seconds, backward_seconds: F and whole B [s].
        activation_bytes: of its output, which travels where the output crosses a cut [bytes].
        parameter_bytes, buffer_bytes: held for any batch [bytes].
        stash_bytes: kept from F to B, counted once where shared [bytes].
        spread: of the samples of F + B, relative (half the interquartile range over the median); 0 when unknown.
        input_grad_seconds, weight_grad_seconds: I and W, each alone [s]; their sum may exceed B, since both walk
            the same graph, and I has what a forward takes longer whose backward can be split. 0 when not measured.
        update_seconds: of the optimizer's step on its parameters, once a batch [s]; 0 when not measured.
        workspace_bytes: the most that F or B holds for a while beyond inputs, outputs and stash [bytes].
        runs_again: whether it does so where a stage recomputes by layer or selectively; False: it keeps its stash even
            then, as the part does that ends in the loss, whose B follows its F at once.
        forward_sums, forward_sum_bytes, backward_sums, backward_sum_bytes: number of sums over the ranks that a cut
            weight lies on, and what each rank holds of them [bytes]; a gathering counts as half a sum of its result.
            Their seconds are in none of the others: the planner knows the links.
        largest_parameter_bytes: of its largest parameter [bytes]; 0 when not known.
        small_parameter_bytes: of its parameters below 256 KiB, whose gradients travel to replicas in common buckets
            [bytes]; those of larger ones travel alone. None when not known: all of them count as small.
        selective_bytes, selective_seconds: kept from F to B under selective recompute, its inputs included, counted
            once where shared [bytes], and what B takes longer then [s]; None when not known.
        keep_less_bytes, keep_less_seconds: the same where results of GELUs are not kept; None when not known, or where
            that frees nothing.
        split: how the T ranks of a tensor group run it: "divided" as the profile of T ranks has it; "whole" on each
            of them; by "samples", 1/T of a microbatch's on each, with whole weights; "samples on" the same, and its
            part passes on to the next node, which is by samples too; "any" of these, as the planner chooses.
        expert_bytes: of the parameters, those of experts, whose gradients every `Profile.expert`-th rank alone sums
            [bytes].
        forward_exchange_seconds, backward_exchange_seconds: of F, and of B or I, those that the members of a group of
            experts, or of one that divides sequences, exchange [s].
        part_seconds: of the host for each replica whose part of its updated parameters is gathered by itself [s].
        joining_seconds: of putting these parts together where a cut follows the node, in F, and of their gradients,
            in B of the next node [s each]; in none of the others.

    Raises ValueError for a figure that is no finite number of at least 0, for one of these pairs alone, and for
    parameters that are larger than all of them.
    """

    name: str
    description: str = ""
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0
    buffer_bytes: float = 0.0
    stash_bytes: float = 0.0
    spread: float = 0.0
    input_grad_seconds: float = 0.0
    weight_grad_seconds: float = 0.0
    update_seconds: float = 0.0
    workspace_bytes: float = 0.0
    forward_sums: float = 0.0
    forward_sum_bytes: float = 0.0
    backward_sums: float = 0.0
    backward_sum_bytes: float = 0.0
    runs_again: bool = True
    largest_parameter_bytes: float = 0.0
    small_parameter_bytes: float | None = None
    selective_bytes: float | None = None
    selective_seconds: float | None = None
    keep_less_bytes: float | None = None
    keep_less_seconds: float | None = None
    split: str = "divided"
    joining_seconds: float = 0.0
    expert_bytes: float = 0.0
    forward_exchange_seconds: float = 0.0
    backward_exchange_seconds: float = 0.0
    part_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"node name {self.name!r}: expected text that is not empty")
        printable("node name", self.name)
        check_figures(self, f"node {self.name}")
        if self.split not in SPLITS:
            fail(f"node {self.name}: split", self.split, f"one of {', '.join(SPLITS)}")
        if not isinstance(self.runs_again, bool):
            fail(f"node {self.name}: runs_again", self.runs_again, "True or False")
        for part in ("largest_parameter_bytes", "small_parameter_bytes", "expert_bytes"):
            if (getattr(self, part) or 0.0) > self.parameter_bytes:
                expected = f"at most parameter_bytes={self.parameter_bytes}"
                fail(f"node {self.name}: {part}", getattr(self, part), expected)
        for way, seconds in (("forward", self.forward_seconds), ("backward", self.backward_seconds)):
            if (part := getattr(self, f"{way}_exchange_seconds")) > seconds:
                fail(f"node {self.name}: {way}_exchange_seconds", part, f"at most {way}_seconds={seconds}")
        for figure, other in [*_PAIRS, *((b, a) for a, b in _PAIRS)]:
            if getattr(self, figure) is None and getattr(self, other) is not None:
                fail(f"node {self.name}: {figure}", None, f"a number along with {other}, or neither")

    @property
    def seconds(self) -> float:
        """F + B [s]."""
        return self.forward_seconds + self.backward_seconds

    def treated(self, kind: str) -> tuple[float, float, float]:
        """Kept besides its inputs [bytes], what runs again [s], made again at once [bytes], as one of COUNTED says."""
        if not self.runs_again:
            return self.stash_bytes, 0.0, 0.0
        kept, seconds = (0.0, self.forward_seconds) if kind == "layer" else self.under(kind)
        return kept, seconds, max(self.stash_bytes - kept, 0.0)

    def under(self, treatment: str) -> tuple[float, float]:
        """Kept from F to B [bytes], and what B takes longer [s], "selective" or "keep_less"; unchanged where it was not
        measured."""
        kept, seconds = getattr(self, f"{treatment}_bytes"), getattr(self, f"{treatment}_seconds")
        return (self.stash_bytes, 0.0) if kept is None else (kept, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model as a graph of nodes with costs.

    Arguments:
        nodes: in any order; ties between equal plans follow it.
        edges: (producer, consumer) by name; None makes a chain of the nodes in their order.
        device: the kind that it was measured on.
        dtype: of the computation.
        origin: "measured", "published" or "formula".
        microbatch_size: samples that the figures are of; None when unknown.
        tensor: ranks over which matrices were cut; the figures are of one of them, `activation_bytes` are whole.
        context: of the tensor ranks, groups that hold the same weights, each with a part of the sequence.
        expert: replicas in a row that have different experts.
        optimizer_ratio: bytes of optimizer state a byte of parameters; None when not measured.
        gradient_ratio: bytes of gradients that replicas sum a byte of parameters.
        gather_ratio: bytes of updated parameters that are gathered, where the optimizer is divided, a byte of them.
        gathers_ahead: whether they are gathered before the next forwards, one stage ahead, in place of after the step.
        sums_early: whether a stage's last backward sums each bucket of gradients as it makes it; else all after it.
        sums_whole: whether gradients are all-reduced at once, after that, where the optimizer is divided; else each
            rank gets the sums of its share.
        sums_by_chunk: whether each of several stages on a rank sums its gradients as one bucket.
        step_seconds: F + B of the whole model, measured at once [s]; None when not measured.
        step_spread: of its samples, relative.
        slowdown: how many times that long the whole took on average, along with what else ran on the machine; the
            seconds of all nodes are of undisturbed moments, see `typical`.
        action_seconds: that the runtime itself takes of a rank around each F, B, I and W, on top of theirs, messages
            apart [s]; 0 when not measured.
        around_seconds: that the runtime itself takes of a step besides its actions, sums, norms and updates: checks,
            the batch that is cut, losses and results [s]; 0 when not measured.
        max_grad_norm: to which the run that it is for clips gradients, which is in its seconds of an update; 0: it does
            not clip; None when unknown.
        sequence_tokens: of one sequence, where the model may run slice by slice (see `Slices`); None: unknown.
        pair_share, slice_share: shares of the seconds of a whole sequence's F and B that grow with the pairs of tokens
            that attend to each other, and that any slice takes, however short; the rest grows with tokens.
        kv_share: bytes that slices keep in addition, over all that a whole sequence keeps from F to B, the largest of
            any node: keys and values once more, their gradients, masks.
        tied: (nodes, bytes) of weights that two nodes or more share. Each counts them among its own, a rank with
            several of the nodes has them once, and where several ranks hold them, their gradients are summed in front
            of the update.

    Raises ValueError for a name that is listed twice, an edge to nowhere, a cycle (printed), a graph in several parts
    that nothing connects, and for `tied` of other than two or more of its nodes.

    >>> chain = Profile(nodes=[Node(name=n, forward_seconds=1, backward_seconds=2) for n in "ab"])
    >>> chain.edges, Profile.from_json(chain.to_json()) == chain
    ((('a', 'b'),), True)
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...] | None = None  # never None once made
    device: str = "device"
    dtype: str = "float32"
    origin: str = "measured"
    microbatch_size: int | None = None
    tensor: int = 1
    context: int = 1
    expert: int = 1
    optimizer_ratio: float | None = None
    gradient_ratio: float = 1.0
    gather_ratio: float = 1.0
    gathers_ahead: bool = False
    sums_early: bool = False
    sums_whole: bool = False
    sums_by_chunk: bool = False
    step_seconds: float | None = None
    step_spread: float = 0.0
    slowdown: float = 1.0
    action_seconds: float = 0.0
    around_seconds: float = 0.0
    max_grad_norm: float | None = None
    sequence_tokens: int | None = None
    pair_share: float = 0.0
    slice_share: float = 0.0
    kv_share: float = 0.0
    tied: tuple[Tied, ...] = ()

    def __repr__(self) -> str:
        size = "" if self.microbatch_size is None else f", microbatch of {self.microbatch_size}"
        size += f", one of {self.tensor} tensor ranks" if self.tensor > 1 else ""
        return f"<Profile {self.origin}: {len(self.nodes)} nodes on {self.device}, {self.dtype}{size}>"

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "tensor", "context", "expert", "sequence_tokens"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        check_figures(self, positive=("step_seconds", "slowdown", "gradient_ratio", "gather_ratio"))
        if self.pair_share + self.slice_share > 1 + 1e-9:
            fail("pair_share + slice_share", self.pair_share + self.slice_share, "at most 1")
        nodes = tuple(self.nodes)
        names = [node.name for node in nodes]
        if not nodes:
            raise ValueError("profile without nodes: expected at least one")
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"node {twice[0]!r} is listed twice in the profile: expected unique names")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin={self.origin!r}: expected one of {', '.join(ORIGINS)}")
        pairs: Iterable[tuple[str, str]] = pairwise(names) if self.edges is None else self.edges
        edges = tuple(dict.fromkeys((src, dst) for src, dst in pairs))
        known = set(names)
        for src, dst in edges:
            for name in (src, dst):
                if name not in known:
                    raise ValueError(
                        f"edge {src} -> {dst}: node {name!r} is not in the profile: expected a node's name"
                    )
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "tied", tuple(_tied(each, known) for each in self.tied))
        self.order()  # refuses cycles
        self._refuse_parts()

    @property
    def rounds(self) -> Rounds:
        return Rounds(*(getattr(self, name) for name in Rounds._fields))

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The edges as positions in `nodes`."""
        position = {node.name: i for i, node in enumerate(self.nodes)}
        return tuple((position[src], position[dst]) for src, dst in self.edges or ())

    def knows(self, treatment: str) -> bool:
        """Whether all nodes that run again have the figures of "selective", or one of them those of "keep_less"."""
        again = [node for node in self.nodes if node.runs_again]
        if treatment == "keep_less":
            return not again or any(node.keep_less_bytes is not None for node in again)
        return treatment != "selective" or all(node.selective_bytes is not None for node in again)

    @property
    def slice_cost(self) -> CausalSeconds:
        """Seconds of a slice in those of a whole sequence: of `Slices`; ValueError where it is unknown."""
        if self.sequence_tokens is None:
            raise ValueError(
                "slices of sequences with a profile that does not say what a slice costs: expected sequence_tokens, "
                "pair_share, slice_share and kv_share, as profile_model(..., sequence_dim=1) and transformer_profile "
                "have them, or a schedule that takes sequences whole, such as '1f1b'"
            )
        T, fixed, pairs = self.sequence_tokens, self.slice_share, self.pair_share
        return CausalSeconds(fixed=fixed, per_token=max(0.0, 1 - fixed - pairs) / T, per_pair=2 * pairs / T**2)

    @property
    def parts_seconds(self) -> float:
        """F + B of all nodes, added up [s]."""
        return sum(node.seconds for node in self.nodes)

    @property
    def parts_over_step(self) -> float | None:
        """The sum of the parts over the step that was measured at once, less one; None where it was not measured."""
        return None if self.step_seconds is None else self.parts_seconds / self.step_seconds - 1

    def holdings(self) -> MemoryUse:
        """Memory of all nodes on a device that runs them, with one microbatch in flight. Gradients take as much as
        parameters; optimizer state is left out where it was not measured."""
        nodes = self.nodes
        parameters = sum(node.parameter_bytes for node in nodes) - self.counted_again([node.name for node in nodes])
        return MemoryUse(
            parameters=parameters,
            gradients=parameters,
            optimizer=parameters * (self.optimizer_ratio or 0.0),
            activations=sum(node.stash_bytes for node in nodes),
            workspace=max((node.workspace_bytes for node in nodes), default=0.0),
            buffers=sum(node.buffer_bytes for node in nodes),
        )

    def counted_again(self, names: Collection[str]) -> float:
        """Bytes of weights that several of these nodes share, beyond the first time that they count."""
        return sum(shared * max(0, len({*nodes} & {*names}) - 1) for nodes, shared in self.tied)

    def order(self) -> tuple[int, ...]:
        """Positions in `nodes`, each after what it needs; of several possible ones always the lowest first."""
        waiting = TopologicalSorter(dict.fromkeys(range(len(self.nodes)), ()))
        for src, dst in self.links:
            waiting.add(dst, src)
        try:
            waiting.prepare()
        except CycleError as error:
            cycle = " -> ".join(self.nodes[at].name for at in error.args[1])
            raise ValueError(f"the edges form a cycle: {cycle}: expected a graph without one") from None
        ready: list[int] = []
        order = []
        while waiting.is_active():
            for at in waiting.get_ready():
                heappush(ready, at)
            order.append(heappop(ready))
            waiting.done(order[-1])
        return tuple(order)

    def _refuse_parts(self) -> None:
        neighbours: list[list[int]] = [[] for _ in self.nodes]
        for src, dst in self.links:
            neighbours[src].append(dst)
            neighbours[dst].append(src)
        seen, todo = {0}, [0]
        while todo:
            for other in neighbours[todo.pop()]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        if len(seen) < len(self.nodes):
            outside = next(i for i in range(len(self.nodes)) if i not in seen)
            raise ValueError(
                f"the profile falls into parts: no edge leads from {self.nodes[0].name!r} and its {len(seen) - 1} "
                f"relatives to {self.nodes[outside].name!r}: expected one connected graph"
            )

    def typical(self) -> Profile:
        """The same with the seconds that a run on this machine will see.

        All nodes are scaled alike, so that F + B of all together are what the whole took on average (or `slowdown`
        times as long, where the whole was not measured): each part had undisturbed moments, the whole fewer. A profile
        that is typical already stays as it is.
        """
        factor, whole = self.slowdown, None
        if self.step_seconds is not None:
            whole = self.step_seconds * self.slowdown
            factor = whole / self.parts_seconds if self.parts_seconds > 0 else factor
        if math.isclose(factor, 1.0, rel_tol=1e-12):
            return replace(self, step_seconds=whole, slowdown=1.0)
        nodes = tuple(
            replace(
                node,
                **{
                    field.name: known * factor
                    for field in fields(node)
                    if field.name.endswith("_seconds") and (known := getattr(node, field.name)) is not None
                },
            )
            for node in self.nodes
        )
        return replace(self, nodes=nodes, step_seconds=whole, slowdown=1.0)

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        last = {"nodes": known.pop("nodes"), "edges": known.pop("edges")}
        tied = known.pop("tied")
        last |= {"tied": tied} if tied else {}
        return json.dumps({"version": _JSON_VERSION, **known, **last}, indent=1, default=int)

    @classmethod
    def from_json(cls, text: str, *, source: str = "profile") -> Profile:
        """Read `to_json`'s form. ValueError names `source`, the field and what was expected."""
        record = parse_object(text, source=source)
        record.version(_JSON_VERSION)
        nodes = tuple(each.made(Node) for each in record.objects("nodes"))
        edges = []
        for i, pair in enumerate(record.items("edges")):
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
                raise ValueError(f"{record.at('edges')}[{i}]: {pair!r}: expected [producer, consumer]")
            edges.append((pair[0], pair[1]))
        given = {"nodes": nodes, "edges": tuple(edges), "tied": tuple(record.items("tied", default=[]))}
        needed = ("device", "dtype", "origin")
        return record.made(
            cls, given, positive=("step_seconds", "slowdown"), needed=needed, choices={"origin": ORIGINS}
        )

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a JSON file."""
        return cls.from_json(read_text(path), source=str(path))


def _tied(pair: object, known: Collection[str]) -> Tied:
    match pair:
        case [[_, _, *_] as nodes, shared] if set(names := tuple(map(str, nodes))) <= set(known):
            if len(set(names)) == len(names):
                return names, number(f"tied: {', '.join(names)}", shared)
    return fail("tied", pair, "pairs of two or more of the profile's nodes, and bytes")
