"""Checkpoints and plain models: out of one into the other, with tied weights and optimizers, without a pipeline."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.inside import Checkpoint, TensorPiece, main
from support.models import token_loss
from support.pipeline import assembled
from support.pool import Pool
from torch import Tensor, nn

import stagewright

WIDTH, WORDS, LENGTH, BATCH, M = 8, 12, 4, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied weights, a frozen weight, one that no forward uses, one without elements, scalars, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 2))
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(seed: int = 0) -> Model:
    """In float64, and with numbers of two more types."""
    torch.manual_seed(seed)
    model = Model().double()
    model.register_buffer("phase", torch.tensor([1.0 + 2.0j, 3.0]))
    model.register_buffer("brief", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    return x, y


@stagewright.named
def adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    flat, rest = ([p for _, p in parameters if (p.ndim < 2) is is_flat] for is_flat in (True, False))
    return torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0, "betas": (0.8, 0.9)}], lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


example = (torch.zeros(BATCH, LENGTH, dtype=torch.long),)
make = partial(
    assembled, num_microbatches=M, loss_fn=token_loss, optimizer=adamw, lr_scheduler=schedule_of, example_inputs=example
)
TWO: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 1}


def equal(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_a_plain_model_loads_what_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = make(make_model(), **TWO)
    for step in range(2):
        pipe.train_step(*batch(step))
    pipe.save(tmp_path / "c")
    state = pipe.full_state_dict()
    found = stagewright.read_checkpoint(tmp_path / "c")
    assert equal(found, state)
    assert list(found) == list(make_model().state_dict())
    assert found["head.weight"] is found["embed.weight"]
    for name in ("model.safetensors", "model.pt"):
        assert main(["export", str(tmp_path / "c"), "-o", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / name).stat().st_size
    plain = make_model(1)
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert equal(plain.state_dict(), state)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert equal(plain.state_dict(), state)
    assert not list(tmp_path.glob("*.partial"))


def test_a_plain_loop_goes_on_from_an_exported_checkpoint(tmp_path: Path) -> None:
    """Optimizer and schedule too: equal to the pipeline, which is equal to the last bit at one microbatch."""
    pipe = make(make_model(), **TWO)
    for step in range(3):
        pipe.train_step(*batch(step))
    pipe.save(tmp_path / "c")
    assert main(["export", str(tmp_path / "c"), "-o", str(tmp_path / "all.pt"), "--optimizer"]) == 0
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert saved["step"] == 3
    plain = make_model(1)
    plain.load_state_dict(saved["model"])
    optimizer = adamw([(name, p) for name, p in plain.named_parameters() if p.requires_grad])
    scheduler = schedule_of(optimizer)
    optimizer.load_state_dict(saved["optimizers"][0])
    scheduler.load_state_dict(saved["schedulers"][0])
    more = [batch(step) for step in range(3, 6)]
    wanted = train_alone(plain, more, lambda _: optimizer, loss_fn=token_loss, scheduler=lambda _: scheduler)
    assert [pipe.train_step(*each).loss for each in more] == wanted.losses
    assert equal(plain.state_dict(), pipe.full_state_dict())


@pytest.mark.thorough(but=["safetensors"])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "without tied"])
def test_a_pipeline_begins_with_plain_weights(kind: str, tmp_path: Path) -> None:
    plain, file = make_model(5), tmp_path / ("m.pt" if kind == "torch" else "m.safetensors")
    tensors = {name: x.clone() for name, x in plain.state_dict().items()}
    if kind == "without tied":  # as other libraries write it: one of the tied names is left out
        del tensors["head.weight"]
    torch.save(plain.state_dict(), file) if kind == "torch" else safetensors.torch.save_file(tensors, file)
    assert main(["export", str(file), "--to-checkpoint", str(tmp_path / "c")]) == 0
    pipe = make(make_model(), **TWO)
    pipe.train_step(*batch(0))
    pipe.load(tmp_path / "c")
    assert pipe.num_steps == 0
    assert equal(pipe.full_state_dict(), plain.state_dict())
    fresh = make(make_model(5), **TWO)
    pipe = make(make_model(), **TWO)
    pipe.load(tmp_path / "c")
    assert [pipe.train_step(*batch(s)).loss for s in range(2)] == [fresh.train_step(*batch(s)).loss for s in range(2)]
    stagewright.import_checkpoint(plain.state_dict(), tmp_path / "again")
    assert equal(stagewright.read_checkpoint(tmp_path / "again") | plain.state_dict(), plain.state_dict())


def test_weights_that_are_tied_here_and_differ_there_are_refused(tmp_path: Path) -> None:
    state = dict(make_model().state_dict())
    state["head.weight"] = state["head.weight"] + 1
    stagewright.import_checkpoint(state, tmp_path / "c")
    message = r"different tensors for \['embed.weight', 'head.weight'\], which are one tensor"
    with pytest.raises(ValueError, match=message):
        make(make_model(), **TWO).load(tmp_path / "c")


def test_what_shares_memory_and_is_another_tensor_is_not_tied(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    state = {"w": weight, "same": weight, "turned": weight.T, "none": torch.empty(0), "nor": torch.empty(0)}
    place = stagewright.import_checkpoint(state, tmp_path)
    assert json.loads((place / "checkpoint.json").read_text())["tied"] == {"same": "w"}
    assert torch.equal(stagewright.read_checkpoint(tmp_path)["turned"], weight.T)


def test_what_cannot_be_exported_or_imported_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(make_model(), **TWO).save(tmp_path / "c")
    (tmp_path / "bad.pt").write_bytes(b"no")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "number.pt")
    with ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        packed.writestr("archive/data/0", bytes(10**6))
    folder, into = str(tmp_path / "c"), str(tmp_path / "new")
    for words, message in [
        ([folder], "expected one of -o FILE"),
        ([folder, "-o", str(tmp_path / "m.bin2")], "expected a file that ends in .safetensors or .pt"),
        ([folder, "-o", str(tmp_path / "m.safetensors"), "--optimizer"], "safetensors hold tensors alone"),
        ([folder, "-o", str(tmp_path / "no" / "m.pt")], "cannot write: expected a file in a folder that exists"),
        ([str(tmp_path / "no"), "-o", str(tmp_path / "m.pt")], "is not a checkpoint: expected a folder from pipe.save"),
        ([str(tmp_path / "bad.pt"), "--to-checkpoint", into], "bad.pt cannot be read"),
        ([str(tmp_path / "bad.safetensors"), "--to-checkpoint", into], "bad.safetensors cannot be read"),
        ([str(tmp_path / "no.pt"), "--to-checkpoint", into], "no.pt cannot be read: [Errno 2] No such file"),
        ([str(tmp_path / "packed.pt"), "--to-checkpoint", into], "packed.pt cannot be read: it is compressed"),
        ([str(tmp_path / "list.pt"), "--to-checkpoint", into], "has list under ''"),
        ([str(tmp_path / "number.pt"), "--to-checkpoint", into], "has int under 'a': expected a model's state_dict()"),
    ]:
        assert main(["export", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


PATTERNS = {"blocks.*.up": "column", "blocks.*.down": "row"}
MESHES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "mesh": {"pipe": 4}},
    {"schedule": "interleaved", "mesh": {"pipe": 2, "data": 2}, "num_chunks": 2, "data_parallel": "zero1"},
    {"schedule": "gpipe", "mesh": {"pipe": 2, "tensor": 2}, "tensor_parallel": PATTERNS},
    {"mesh": {"data": 2, "tensor": 2}, "tensor_parallel": PATTERNS, "data_parallel": "fsdp"},
    {"schedule": "1f1b", "mesh": {"pipe": 2, "data": 2}},
]
STEPS = 1  # of each run


def chain(folder: str) -> list[tuple[list[float], int]]:
    """Losses of each run of the chain, and how many bytes this process read of the checkpoint that it began with."""
    read: list[int] = []
    tensor = Checkpoint._tensor

    def count(self: Checkpoint, key: str, piece: TensorPiece) -> Tensor:
        read[-1] += prod(piece.sizes) * 8
        return tensor(self, key, piece)

    Checkpoint._tensor = count  # type: ignore[method-assign]
    found = []
    try:
        for number, options in enumerate(MESHES):
            replicas = options["mesh"].get("data", 1)
            pipe = make(make_model(), **options, **{"num_microbatches": M // replicas})
            read.append(0)
            if number:
                pipe.load(f"{folder}/{number - 1}")
            losses = []
            for step in range(number * STEPS, (number + 1) * STEPS):
                x, y = (
                    torch.cat(part.tensor_split(M)[pipe._building.replica[0] :: replicas]) if replicas > 1 else part
                    for part in batch(step)
                )
                losses.append(pipe.train_step(x, y).loss)
            pipe.save(f"{folder}/{number}")
            pipe.close()
            found.append((losses, read[-1]))
    finally:
        Checkpoint._tensor = tensor  # type: ignore[method-assign]
    return found


@pytest.mark.thorough
def test_from_mesh_to_mesh(gloo: Pool, tmp_path: Path) -> None:
    results = gloo.run(chain, ranks=4, args=(str(tmp_path),))
    model = make_model()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    losses, _, state = train_alone(
        model,
        map(batch, range(STEPS * (len(MESHES) + 1))),
        lambda _: adamw(named),
        loss_fn=token_loss,
        scheduler=schedule_of,
    )
    for found in results:
        told = [loss for run, _ in found for loss in run]
        assert told == pytest.approx(losses[: len(told)], rel=0, abs=1e-11)
    sizes = [
        [size for size, _ in json.loads(path.read_text())["files"].values()]
        for number in range(len(MESHES))
        for path in (tmp_path / str(number)).glob("step-*/checkpoint.json")
    ]
    assert [len(each) for each in sizes] == [4] * len(MESHES)  # each process wrote
    assert max(sizes[-1]) < 2 * min(sizes[-1])  # replicas shared it out
    assert all(found[-1][1] < 0.7 * sum(sizes[-2]) for found in results)  # and each read what it needs

    pipe = make(make_model(), mesh={"pipe": 3})
    pipe.load(tmp_path / str(len(MESHES) - 1))
    for step in range(len(MESHES) * STEPS, (len(MESHES) + 1) * STEPS):
        assert pipe.train_step(*batch(step)).loss == pytest.approx(losses[step], rel=0, abs=1e-11)
    near(pipe.full_state_dict(), state, atol=1e-10)
