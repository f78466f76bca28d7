"""Mesh(compress=): messages that are packed, beside one plain process that packs at the same boundaries."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import Alone, near, train_alone, train_piped
from support.inside import choose, pack, unpack
from support.parts import Parts
from support.pool import Pool
from torch import Tensor, nn

import stagewright as sw
from stagewright.comm import Codec, TensorSpec
from stagewright.pipe import PipelineModule
from stagewright.schedules import Costs, Link, Schedule, simulate

STEPS, M, LR = 3, 4, 0.1
CODECS = {"int8": Codec("int8"), "topk": Codec("topk", 0.2), "lowrank": Codec("lowrank", 1)}
BYTES = {"int8": 2 * 12 + 2 * 8, "topk": 5 * (8 + 4), "lowrank": (2 + 12) * 8}  # of two samples, each 12 float64


def units(width: int = 12) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()).double() for _ in range(3)] + [
        nn.Linear(width, width).double()
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * M, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.roll(1, dims=1).sin()


class Packed(torch.autograd.Function):
    """A boundary: what arrives of the activations, and of their gradients, with a memory of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, through: Callable[[str, Tensor], Tensor]) -> Tensor:
        ctx.through = through
        return through("act", x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.through("grad", gradient), None


def boundary(codec: Codec) -> Callable[[Tensor], Tensor]:
    memory: dict[str, Tensor | None] = {}

    def through(way: str, x: Tensor) -> Tensor:
        packed, memory[way] = pack(codec, x, memory.get(way))
        return unpack(codec, packed, TensorSpec.of(x.detach()))

    return lambda x: Packed.apply(x, through)


def plain(codecs: dict[int, Codec]) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of one process that packs behind these units."""
    between = {unit: boundary(codec) for unit, codec in codecs.items()}

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        for unit, module in enumerate(model):
            x = module(x)
            x = between[unit](x) if unit in between else x
        return F.mse_loss(x, y)

    momentum = partial(torch.optim.SGD, lr=LR, momentum=0.9)
    found = train_alone(nn.ModuleList(units()), map(batch, range(STEPS)), momentum, parts=M, loss_of=loss_of)
    return found.losses, [*found.state.values()]


def make(compress: object, **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"num_microbatches": M, "loss_fn": F.mse_loss, "schedule": "1f1b", "timeout": 60.0}
    settings |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9)}
    mesh = {"pipe": 2} | options.pop("mesh", {})
    model = options.pop("model", None) or nn.Sequential(*units())
    return PipelineModule(model, **settings | options, mesh=sw.Mesh(**mesh, compress=compress))


def trained(pipe: PipelineModule, steps: Sequence[int] = range(STEPS)) -> tuple[list[float], list[Tensor]]:
    results = [*(pipe.train_step(*batch(step)) for step in steps), *pipe.flush()]
    losses = [each.loss for each in results if each.loss is not None]
    return losses, [x.clone() for x in pipe.full_state_dict().values()]


same = partial(near, rtol=1e-10)


@pytest.mark.thorough(but=["zb-h1-int8"])
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, [1]),
        ({"schedule": "zb-h1"}, [1]),
        ({"schedule": "interleaved", "num_chunks": 2, "recompute": "full"}, [0, 1, 2]),
    ],
    ids=["1f1b", "zb-h1", "interleaved"],
)
def test_a_plain_process_that_packs_at_the_boundary(kind: str, options: dict[str, Any], cuts: list[int]) -> None:
    """The first batch is verified, exactly, and leaves nothing in the memories; so does an evaluation."""
    codec = CODECS[kind]
    pipe = make({kind: codec.level} if codec.level else kind, verify=True, **options)
    first = pipe.eval_step(*batch(0)).loss
    found = trained(pipe)
    same(found, plain(dict.fromkeys(cuts, codec)))
    assert first != pytest.approx(found[0][0], rel=1e-6)  # exact, and not what was trained on
    links = {(cut, cut + 1) for cut in range(len(cuts))}
    for src, dst in [*links, *((b, a) for a, b in links)]:
        assert pipe.sent_bytes[src, dst] == (STEPS * M * BYTES[kind], STEPS * M * 2 * 12 * 8)


def test_boundaries_by_name_before_all_of_them_and_bytes_as_simulated() -> None:
    options: dict[str, Any] = {"schedule": "interleaved", "num_chunks": 2}
    pipe = make({"pipe": "int8", (1, 2): {"topk": 0.2}}, **options)
    same(trained(pipe), plain({0: CODECS["int8"], 1: CODECS["topk"], 2: CODECS["int8"]}))
    links = pipe.links(Link(seconds_per_byte=1e-6))
    assert links.activation_bytes == (BYTES["int8"], BYTES["topk"], BYTES["int8"]) == links.gradient_bytes
    for stage, size in enumerate(links.activation_bytes):
        sent = pipe.sent_bytes
        assert sent[stage, stage + 1][0] == sent[stage + 1, stage][0] == STEPS * M * size
    whole = make(None, **options)
    whole.build(*batch(0))
    assert whole.links(Link()).activation_bytes == (192.0, 192.0, 192.0)
    costs = Costs(forward=1e-6, backward=1e-6)
    link = Link(seconds_per_byte=1e-6)
    slow, fast = (simulate(each.schedule, costs, each.links(link)).makespan for each in (whole, pipe))
    assert slow > 2 * fast


class Skips(Parts, first=lambda: units()[0], second=lambda: units()[1], third=lambda: units()[2]):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(self.second(x) + x) + x


REFUSED: list[tuple[object, dict[str, Any], str]] = [
    ("zip", {}, "compress='zip': expected 'int8', 'topk'"),
    ({"topk": 1.5}, {}, r"compress=\{'topk': 1.5\}: expected 'int8', 'topk'"),
    ({(1, 2): "int8"}, {}, r"compress=\{\(1, 2\): 'int8'\}: no message is sent there.* are \(0, 1\)$"),
    ({(1, 0): "int8"}, {}, "no message is sent there"),
    ("int8", {"mesh": {"pipe": 1}}, "no message is sent there. Boundaries between ranks are none"),
    ({"data": "int8"}, {}, r"where no stage has replicas: expected Mesh\(data=D\)"),
    ({"data": "int8"}, {"mesh": {"data": 2}}, "in one process, where replicas share Parameters"),
    ("int8", {"precision": "fp16"}, "with a grad_scaler: expected precision='bf16'"),
    ({"auto": {(0, 1): Link()}}, {}, "no way from rank 1 to rank 0"),
    ("auto", {"optimizer": None}, "compress='auto' without an optimizer"),
    ("auto", {"schedule": "2bw"}, "compress='auto' under the asynchronous '2bw'"),
    ({(0, 1): "int8"}, {"model": "tokens"}, r"nothing there becomes smaller, since messages there are torch.int64"),
    ({(0, 1): "int8", (0, 2): "topk"}, {"model": "skips"}, r"stages .1, 2. are on one rank, and get one message"),
    ({"lowrank": 6}, {}, r"nothing there becomes smaller, since messages there are torch.float64 \[2, 12\]"),
]


@pytest.mark.thorough(
    but=[
        "compress1-options1-compress=\\\\{'topk': 1.5\\\\}: expected 'int8', 'topk'",
        "compress2-options2-compress=\\\\{\\\\(1, 2\\\\): 'int8'\\\\}: no message is sent there.* are \\\\(0, 1\\\\)$",
        "auto-options10-compress='auto' under the asynchronous '2bw'",
        "compress11-options11-nothing there becomes smaller, since messages there are torch.int64",
        "compress12-options12-stages .1, 2. are on one rank, and get one message",
    ]
)
@pytest.mark.parametrize(("compress", "options", "expected"), REFUSED)
def test_what_cannot_be_is_refused_before_a_step(compress: object, options: dict[str, Any], expected: str) -> None:
    x, y = batch(0)
    if options.get("model") == "tokens":
        model = nn.Sequential(nn.Identity(), nn.Embedding(12, 12).double(), nn.Linear(12, 12).double(), nn.Flatten())
        options, x, y = options | {"model": model, "cut": ["1"]}, x.abs().long(), x.repeat(1, 12)
    if options.get("model") == "skips":
        options = options | {"model": Skips(), "cut": ["second", "third"], "schedule": two_on_the_second_rank()}
    with pytest.raises(ValueError, match=expected):
        make(compress, **options).build(x, y)


def two_on_the_second_rank() -> Schedule:
    rows = [["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"]]
    rows.append([each for k in range(M) for each in (f"1F{k}", f"2F{k}", f"2B{k}", f"1B{k}")])
    return Schedule.from_csv("\n".join(map(",".join, rows)))


def test_one_message_for_two_stages_of_a_rank() -> None:
    """Packed once, and counted once; the sum of their gradients likewise."""
    options: dict[str, Any] = {"cut": ["second", "third"], "schedule": two_on_the_second_rank()}
    pipe = make({(0, 1): "int8"}, model=Skips(), **options)
    (found, _), (exact, _) = trained(pipe), trained(make(None, model=Skips(), **options))
    assert found != exact
    assert found == pytest.approx(exact, rel=1e-2)
    assert pipe.sent_bytes == dict.fromkeys(((0, 1), (1, 0)), (STEPS * M * BYTES["int8"], STEPS * M * 192))


def over_processes(compress: object, options: dict[str, Any], replicas: int) -> tuple[Alone, Any]:
    pipe = make(compress, mesh={"data": replicas}, num_microbatches=M // replicas, **options)
    parts = ([torch.cat(x.chunk(M)[pipe.rank % replicas :: replicas]) for x in batch(step)] for step in range(STEPS))
    return train_piped(pipe, parts), pipe.sent_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compress", "options", "replicas"),
    [({"topk": 0.2}, {}, 2), ({"lowrank": 1}, {"schedule": "2bw"}, 1), ("int8", {"schedule": "zb-h1"}, 1)],
    ids=["replicas", "2bw", "zb-h1"],
)
def test_processes_as_in_one(gloo: Pool, compress: object, options: dict[str, Any], replicas: int) -> None:
    """Each rank has memories of its own."""
    pipe = make(compress, mesh={"data": replicas}, num_microbatches=M // replicas, **options)
    expected, sent = trained(pipe), pipe.sent_bytes
    found = gloo.run(over_processes, ranks=2 * replicas, args=(compress, options, replicas))
    for each, _ in found:
        same([each.losses, [*each.state.values()]], [expected[0][-len(each.losses) :], expected[1]])
    for link, (packed, whole) in sent.items():
        assert sum(each.get(link, (0, 0))[0] for _, each in found) == packed < whole


@pytest.mark.parametrize("compress", ["int8", {"topk": 0.2}], ids=["int8", "topk"])
def test_a_checkpoint_says_what_it_has_not(compress: object, tmp_path: Path) -> None:
    """A codec without a memory goes on as if nothing had been; else that is told, and the memory begins anew."""
    pipe = make(compress)
    trained(pipe)
    pipe.save(tmp_path)
    going_on = [trained(pipe, range(STEPS, 5)), trained(pipe, range(5, 6))]
    with nullcontext() if compress == "int8" else pytest.warns(UserWarning, match="left out on links, which"):
        pipe.load(tmp_path)
    again, other = trained(pipe, range(STEPS, 5)), make(compress)
    with nullcontext() if compress == "int8" else pytest.warns(UserWarning, match="left out on links, which"):
        other.build(*batch(0))
        other.load(tmp_path)
    same(again, trained(other, range(STEPS, 5)))
    assert (again[0] == going_on[0][0]) == (compress == "int8")


def decided(network: object, width: int = 64) -> tuple[dict[Any, float], list[float]]:
    """Sent bytes of a step by link, as a share of the whole ones, in front of the decision and behind it."""
    pipe = make({"auto": network}, mesh={"pipe": 4}, model=nn.Sequential(*units(width)), num_microbatches=8)
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = [pipe.train_step(x, x.sin()).loss for _ in range(5)]
    assert pipe.sent_bytes == {}
    losses.append(pipe.train_step(x, x.sin()).loss)
    return {link: packed / whole for link, (packed, whole) in pipe.sent_bytes.items() if link[0] < link[1]}, losses


def test_auto_packs_slow_links_and_no_others() -> None:
    """With stated links: free ones stay exact; of slow ones the one that is slower than all others is packed most."""
    assert decided(Link())[0] == {}
    slow = Link(seconds_per_byte=1e-4)
    found, losses = decided({(a, b): slow if {a, b} == {1, 2} else Link() for a in range(4) for b in range(4)})
    assert found == {(1, 2): 1 / 8 + 1 / 64}
    assert losses[4] != losses[5]


def decided_by_measuring() -> tuple[dict[Any, Any], float]:
    pipe = make("auto", model=nn.Sequential(*units(64)))
    x = torch.randn(2 * M, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = [pipe.train_step(x, x.sin()).loss for _ in range(7)]
    codecs = pipe._building.pipeline.state.run.added[0].codecs.boundaries
    pipe.close()
    return dict(codecs), losses[-1]


def test_auto_measures_links_and_decides_alike_on_all_ranks(gloo: Pool) -> None:
    (mine, loss), (other, its) = gloo.run(decided_by_measuring, ranks=2)
    assert mine == other
    assert loss == its


STAGES = [(0, 1), (1, 2), (2, 3)]
LIGHT, HEAVY = Codec("int8"), Codec("topk", 0.01)


def chosen(work: float, seconds: dict[tuple[int, int], float]) -> dict[tuple[int, int], Codec]:
    """Seconds of a step that takes as long as its work, or as its slowest link."""
    ratio = {None: 1.0, LIGHT: 0.25, Codec("topk", 0.05): 0.1, HEAVY: 0.02}

    def step(codecs: dict[tuple[int, int], Codec]) -> tuple[float, dict[tuple[int, int], float]]:
        took = {link: each * ratio[codecs.get(link)] for link, each in seconds.items()}
        slowest = max(took, key=lambda link: took[link])
        return max(work, took[slowest]), {slowest: took[slowest]}

    return choose(STAGES, step, (None, LIGHT, Codec("topk", 0.05), HEAVY))


def test_the_ladder_stops_where_the_step_does() -> None:
    """By hand: work of 1 s hides links of 1 s."""
    none = dict.fromkeys(STAGES, 0.5)
    assert chosen(1.0, none) == {}
    assert chosen(1.0, none | {(0, 1): 3.0}) == {(0, 1): LIGHT}
    assert chosen(1.0, none | {(0, 1): 3.0, (2, 3): 40.0}) == {(0, 1): LIGHT, (2, 3): HEAVY}
    assert chosen(1.0, dict.fromkeys(STAGES, 3.0)) == dict.fromkeys(STAGES, LIGHT)  # one alone would not help
    assert chosen(1.0, none | {(0, 1): 1.04}) == {}  # not worth it


def test_what_did_not_help_is_taken_back() -> None:
    """The path has more bytes of one link, and the step depends on the other."""

    def step(codecs: dict[tuple[int, int], Codec]) -> tuple[float, dict[tuple[int, int], float]]:
        return 1.0 if (1, 2) in codecs else 2.0, {(0, 1): 5.0, (1, 2): 1.0}

    assert choose(STAGES, step) == {(1, 2): LIGHT}
