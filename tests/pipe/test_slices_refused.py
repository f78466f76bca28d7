"""Slices of the sequence: models, losses and options that cannot be right over slices raise ValueError."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parts import GIVEN, Parts
from support.records import records
from support.sliced import VOCABULARY, T, batch, chain, gpt, mean_loss
from torch import Tensor, nn

from stagewright import PipelineModule, Slices, first_position


class Mixer(nn.Module):
    """One layer between embedding and head, over [B, T, 8]."""

    def __init__(self, mix: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.mix, self.own = mix, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attention(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options).transpose(1, 2).flatten(2)


def silent_convolution() -> nn.Module:
    """Sees the token before, with weights that are zero when the pipeline is built."""
    layer = nn.Conv1d(8, 8, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return Mixer(lambda x: layer(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2), layer)


class OwnPositions(Parts, places=lambda: nn.Embedding(T, 8)):
    def forward(self, x: Tensor) -> Tensor:
        positions: Tensor = self.places(torch.arange(x.shape[1]))
        return x + positions


class _Does(Parts, function=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def unseen_within() -> nn.Module:
    """Tensors that are nested, or of a vmap, in its modules; then a sum."""
    nested, layer = _Does(lambda x: torch.nested.nested_tensor([*x])), nn.Linear(8, 8)
    inner = nn.ModuleList([nested, layer, _Does(lambda x: torch.func.vmap(layer)(x) + nested(x).to_padded_tensor(0.0))])
    return Mixer(lambda x: inner[2](x).cumsum(1), inner)


def flat() -> nn.Module:
    """Tokens and samples in one dimension, which the last module divides."""
    first = _Does(lambda x: x * (1 + x[:1].abs()))
    return nn.Sequential(nn.Flatten(0, 1), first, nn.Linear(8, 8), _Does(lambda x: x.unflatten(0, (2, -1))))


def by_hand(x: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(
        ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -torch.inf
    )
    return scores.softmax(-1) @ x


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bidirectional": (
        lambda: Mixer(attention),
        "attention with is_causal=False in Mixer, over slices of the sequence: expected",
    ),
    "mask": (
        lambda: Mixer(lambda x: attention(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())),
        r"attention with a mask of shape \(12, 12\) in Mixer, .* or stagewright.attend",
    ),
    "by-hand": (
        lambda: Mixer(by_hand),
        "output 0 of stage 0 .* differs over parts .* from '1' .Mixer. on: for tokens 4 to 8",
    ),
    "convolution": (silent_convolution, "for tokens 4 to 8 of 12 by .* from that of the whole"),
    "sum": (lambda: Mixer(lambda x: x.cumsum(1)), "for tokens 4 to 8 of 12"),
    "reversed": (lambda: Mixer(lambda x: x.flip(1)), "for tokens 0 to 4 of 12"),
    "batchnorm": (lambda: nn.BatchNorm1d(T), "stage 0 .* fails|differs over parts|running_mean"),
    "positions": (OwnPositions, "for tokens 4 to 8 .* stagewright.positions"),
    "windows": (
        lambda: Mixer(lambda x: attention(x.unflatten(1, (2, -1)).flatten(0, 1), is_causal=True).view_as(x)),
        "attention over 6 queries and 6 keys in Mixer, to which 12 tokens are given",
    ),
    "unseen": (unseen_within, "from '1' .Mixer. on: for tokens 4 to 8 of 12"),
    "flat": (flat, "from '1' .Sequential. on: for tokens 4 to 8 of 12"),
    "signs": (
        lambda: nn.Sequential(_Does(lambda x: x * x[:, :1].sign()), nn.GELU()),
        "from '1.0' ._Does. on: for tokens 4 to 8",
    ),
}


@pytest.mark.thorough(but=["bidirectional", "mask", "reversed", "batchnorm", "windows", "unseen"])
@pytest.mark.parametrize(("layer", "message"), MODELS.values(), ids=MODELS)
def test_models_whose_tokens_meet_elsewhere(layer: Callable[[], nn.Module], message: str) -> None:
    torch.manual_seed(0)
    tokens, targets = batch()
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), layer(), nn.Linear(8, VOCABULARY)).double()
    pipe = PipelineModule(model, schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(tokens, targets)


def shifting_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], tokens[:, 1:])


def mean_of_some(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


@pytest.mark.parametrize(
    ("loss_fn", "counted", "told"),
    [
        (shifting_loss, T, ".*"),
        (mean_of_some, T, ".*"),
        (lambda logits, targets: mean_loss(logits[:, -1:], targets[:, -1:]), T, ".*"),
        (mean_of_some, 8, "nan"),  # none of the last slice counts
    ],
)
def test_losses_that_do_not_add_up(loss_fn: Callable[[Tensor, Tensor], Tensor], counted: int, told: str) -> None:
    pipe = PipelineModule(
        chain(layers=1), schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=loss_fn
    )
    tokens, targets = batch()
    targets[:, counted:] = 0
    message = rf"loss_fn makes .* of whole sequences and {told} of their 3 parts: expected a mean"
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(tokens, targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slices": 13}, "a sequence of 12 tokens for num_slices=13"),
        ({"num_slices": 2, "lengths": [6, 5]}, r"lengths=\[6, 5\] make 11 tokens, .* have 12"),
        ({"num_slices": 2, "lengths": [4, 4, 4]}, r"lengths=\[4, 4, 4\] for 2 slices: expected 2 numbers"),
        ({"lengths": [6, 6.0]}, r"lengths=\[6, 6.0\]: expected a list with the number of tokens of each slice"),
        ({"dims": {0: 0}}, r"dims\[0\]=0 and input 0 has shape \(2, 12\): .* other than that of the batch"),
        ({"dims": {0: "1"}}, r"dims\[0\]='1': expected the number of a dimension"),
        ({"schedule": "1f1b", "num_slices": 2}, "num_slices=2 for schedule '1f1b': it takes microbatches whole"),
        ({"schedule": "1f1b", "lengths": [12]}, "Slices around the schedule '1f1b', which is not sliced"),
        ({"loss_fn": "model"}, 'loss_fn="model" under schedule'),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    options = {"schedule": "seq1f1b", "num_microbatches": 2, "loss_fn": mean_loss, **options}

    def build_and_run() -> None:
        PipelineModule(chain(layers=1), **records(**options)).forward_backward(*batch())

    with pytest.raises(ValueError, match=message):
        build_and_run()


@pytest.mark.parametrize(
    ("inputs", "target", "name"),
    [
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4)), None, "input 1 has shape"),  # one number a sequence
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4, 3)), None, "input 1 has shape"),
        ((torch.zeros(4, T, dtype=torch.long), torch.zeros(4, T, T)), None, "input 1 has shape"),  # a mask: two of them
        ((torch.zeros(4, T, dtype=torch.long),), torch.zeros(4, dtype=torch.long), "the target has shape"),
    ],
    ids=["a-number", "another-size", "twice", "target"],
)
def test_where_the_sequence_stands_must_be_clear(inputs: tuple[Tensor, ...], target: Tensor | None, name: str) -> None:
    target = torch.zeros(4, T, dtype=torch.long) if target is None else target

    class Two(nn.Module):
        def forward(self, tokens: Tensor, other: Tensor) -> Tensor:
            return tokens.double().unsqueeze(-1) + other.sum()

    model = gpt(layers=1) if len(inputs) == 1 else Two()
    pipe = PipelineModule(model, schedule="seq1f1b", num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match=rf"{name} .* and which dimension is the sequence .*is not clear"):
        pipe.forward_backward(*inputs, target)


class Dropped(Parts, block=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if not self.training or torch.rand(()) < 0.5 else x


def test_layers_that_are_left_out_of_some_slices() -> None:
    model = chain(layers=4)
    for number in range(1, 5):
        model[number] = Dropped(model[number])
    pipe = PipelineModule(model, schedule=Slices("seq1f1b", num_slices=3), num_microbatches=2, loss_fn=mean_loss)
    with pytest.raises(ValueError, match="runs for the slice that begins at token 4, and did not for"):
        pipe.forward_backward(*batch())


def test_positions_without_slices() -> None:
    assert first_position() == 0
