"""A translation model of LSTMs with attention, as Echo and TBD measure them: several cut units, most memory in few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recurrent(nn.Module):
    """An LSTM that hands on its outputs only: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attention(nn.Module):
    """Luong's: a decoder's outputs [B, T, D] and what they attend to of an encoder's [B, S, D] -> [B, T, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.join = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width)

    def forward(self, decoded: Tensor, encoded: Tensor) -> Tensor:
        weights = torch.softmax(self.query(decoded) @ encoded.transpose(1, 2), dim=-1)
        return torch.tanh(self.join(torch.cat([weights @ encoded, decoded], dim=-1)))


class Seq2Seq(nn.Module):
    """(source [B, S], shifted target [B, T]), of tokens -> logits [B, T, vocabulary]."""

    def __init__(self, *, vocabulary: int = 200, width: int = 64, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.source, self.shifted = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.attention, self.dropout = Attention(width), nn.Dropout(dropout)
        self.project = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, shifted: Tensor) -> Tensor:
        encoded, decoded = self.source(source), self.shifted(shifted)
        for layer in self.encoder:
            encoded = layer(encoded)
        for layer in self.decoder:
            decoded = layer(decoded)
        return self.project(self.dropout(self.attention(decoded, encoded)))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(samples: int, length: int, vocabulary: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Source, shifted target and target."""
    tokens = torch.randint(vocabulary, (samples, 2 * length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :length], tokens[:, length:-1], tokens[:, length + 1 :]


def footprint(budgets: list[str | None], ranks: int) -> None:
    """Prints bytes of activations at the peak and the time of a step, under budgets beside without, in turn.

    OMP_NUM_THREADS=1 .venv/bin/python tests/support/lstm_seq2seq.py 5MB 5MB
    """
    import statistics
    import time

    from stagewright.pipe import PipelineModule

    pipes, held, seconds = [], [], ([], [])
    data = batch(64, 24)
    for recompute in ("none", {"memory_budget": budgets}):
        torch.manual_seed(0)
        options = {"loss_fn": token_loss, "optimizer": torch.optim.Adam, "num_microbatches": 4, "verify": False}
        pipe = PipelineModule(Seq2Seq(), mesh={"pipe": ranks}, recompute=recompute, **options)
        pipe.train_step(*data)
        with pipe.watch_memory() as memory:
            pipe.train_step(*data)
        held.append(memory.peak_bytes - pipe.held_bytes())
        pipes.append(pipe)
    for _ in range(60):
        for pipe, each in zip(pipes, seconds, strict=True):
            begun = time.perf_counter()
            pipe.train_step(*data)
            each.append(time.perf_counter() - begun)
    print(pipes[1].explain())
    print(f"activations {held[0]:,} -> {held[1]:,} bytes: {held[0] / held[1]:.2f} times smaller")
    ratio, least = (f(seconds[1]) / f(seconds[0]) for f in (statistics.median, min))
    print(f"time of a step {ratio:.2f} times (medians of 60 in turn; of the fastest {least:.2f})")


if __name__ == "__main__":
    import sys

    footprint([None if each == "None" else each for each in sys.argv[1:]], len(sys.argv) - 1)
