"""GPT-2 as transformers has it, unmodified: dict batches with padding, its own loss, its own `generate`.

    torchrun --nproc-per-node 2 examples/gpt2.py --steps 30

learns to sort letters, `dbca>abcd`, from random words of 2 to 8 letters. The model comes from a configuration: nothing
is downloaded; `GPT2LMHeadModel.from_pretrained(...)` is trained in the same way. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stagewright as sw

LETTERS = "abcdefgh"
SIGNS = ["<pad>", ">", ".", *LETTERS]


def encode(text: str) -> list[int]:
    return [SIGNS.index(sign) for sign in text]


def make_batch(step: int, size: int = 32) -> dict[str, torch.Tensor]:
    """Words of one batch, the same in every process; padded to the longest."""
    draw = random.Random(step)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 8))) for _ in range(size)]
    rows = [encode(f"{word}>{''.join(sorted(word))}.") for word in words]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    labels = ids.clone()
    for label, word in zip(labels, words, strict=True):
        label[: len(word) + 1] = -100  # the question is given, only the answer is learnt
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights in each process
    config = GPT2Config(
        vocab_size=len(SIGNS),
        n_positions=32,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    with sw.PipelineModule(
        model,
        schedule=options.schedule,
        mesh={"pipe": max(2, int(os.environ.get("WORLD_SIZE", "1")))},
        num_microbatches=4,
        loss_fn="model",  # it returns its loss, a mean over the labels that are not -100
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_grad_norm=1.0,
        verify=True,  # the first batch is compared with the plain model
    ) as pipe:
        for step in range(1, options.steps + 1):
            result = pipe.train_step(**make_batch(step))
            if pipe.rank == 0 and step % 10 == 0 and result.loss is not None:
                print(f"step {step}: loss {result.loss:.3f}", flush=True)
        weights = pipe.full_state_dict()  # on every rank: what follows is plain transformers
        if pipe.rank == 0:
            plain = GPT2LMHeadModel(config).eval()
            plain.load_state_dict(weights)
            for word in ("hgfe", "badcab"):
                question = torch.tensor([encode(f"{word}>")])
                answer = plain.generate(question, attention_mask=torch.ones_like(question), max_new_tokens=12)
                print("".join(SIGNS[number] for number in answer[0].tolist()))


if __name__ == "__main__":
    main()
