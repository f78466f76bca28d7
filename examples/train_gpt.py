"""A language model of your own, trained over torchrun: loader, checkpoints, resume, and text at the end.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 40

learns the Python of the standard library, letter by letter, as a pipeline of two processes. Stop it at any time and
type the same line again: it resumes from the newest checkpoint in --folder. The same script runs with both ranks in one
process: `python examples/train_gpt.py --steps 40`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import stagewright as sw


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Tokens [N, T] -> scores [N, T, 256] of the next one; the embedding is used at both ends."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4, length: int = 64) -> None:
        super().__init__()
        self.length = length
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text: (tokens [T], the same one letter later [T])."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.tensor(list(text))
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        piece = self.tokens[start : start + self.length + 1]
        return piece[:-1], piece[1:]


def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the letters."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: GPT, start: str, letters: int) -> str:
    """Continue a text by sampled letters, one after the other."""
    model.eval()
    tokens = torch.tensor([list(start.encode())])
    generator = torch.Generator().manual_seed(0)
    for _ in range(letters):
        scores = model(tokens[:, -model.length :])[0, -1]
        following = torch.multinomial(F.softmax(scores / 0.8, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs/example-gpt"))
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights in each process
    model = GPT()
    library = Path(os.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(library.glob("[a-d]*.py")))

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with sw.PipelineModule(
        model,
        device="cuda" if torch.cuda.is_available() else "cpu",
        schedule="1f1b",
        mesh={"pipe": max(2, ranks)},
        num_microbatches=4,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_grad_norm=1.0,
        example_inputs=(torch.zeros(16, model.length, dtype=torch.long),),
        verify=True,  # the first batch is compared with the plain model
    ) as pipe:
        loader = pipe.loader(Text(text, model.length), batch_size=16)
        checkpoint = options.folder / "checkpoint"
        if checkpoint.exists():
            pipe.load(checkpoint, loader=loader)
            print(f"rank {pipe.rank} resumes after step {pipe.num_steps}", flush=True)
        while pipe.num_steps < options.steps:
            for tokens, targets in loader:
                result = pipe.train_step(tokens, targets)
                step = pipe.num_steps
                if pipe.rank == 0 and step % 10 == 0:
                    print(f"step {step}: loss {result.loss:.3f}", flush=True)
                if step % options.every == 0 or step == options.steps:
                    pipe.save(checkpoint, loader=loader)
                if step == options.steps:
                    break

        weights = pipe.full_state_dict()  # on every rank: what follows is plain PyTorch
        if pipe.rank == 0:
            plain = GPT()
            plain.load_state_dict(weights)
            print(write(plain, "def ", 200))


if __name__ == "__main__":
    main()
