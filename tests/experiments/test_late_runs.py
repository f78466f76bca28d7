"""The emulation of late weights behind a table of experiments/results/convergence: its versions, and its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.async_reference import AsyncCase, uses
from support.inside import GPT, GPTConfig, load_corpus, loss_fn, make_optimizer
from support.late_runs import MATRICES, Batch, stage_of


@pytest.mark.parametrize(("ranks", "every"), [(8, 1), (8, 4), (8, 8), (4, 4)])
@pytest.mark.parametrize("first", [0, 3])
def test_versions_are_those_of_the_rule(ranks: int, every: int, first: int) -> None:
    run = {"P": ranks, "every": every, "updates": 14, "flush_first": first}
    emulated = Batch([run], "cpu", None)
    case = AsyncCase(
        task="mlp",
        schedule="pipedream",
        num_ranks=ranks,
        num_microbatches=every,
        update_every=every,
        sizes=(every,) * 14,
        flush_first=first,
    )
    expected = uses(case)
    for g in range(14):
        for kind, found in emulated.versions(g).items():
            for layer, ((versions,),) in enumerate(zip(found.tolist(), strict=True)):
                stage = stage_of(kind, layer, ranks)
                assert versions == [row[stage].right % emulated.R for row in expected[g * every : (g + 1) * every]]


def _named(weights: dict[str, torch.Tensor], run: int) -> dict[str, torch.Tensor]:
    """Weights of a run by the names of the GPT."""
    ends = {"tok": "embedding.tokens.weight", "pos": "embedding.positions", "head": "head.linear.weight"}
    ends |= {"nfw": "head.norm.weight", "nfb": "head.norm.bias"}
    inner = {"n1": "norm1", "n2": "norm2", "qkv": "attention.qkv", "out": "attention.out", "up": "up", "down": "down"}
    found = {ends[kind]: value[0, run] for kind, value in weights.items() if kind in ends}
    for kind, value in weights.items():
        if kind not in ends:
            part = inner[kind if kind in MATRICES else kind[:-1]]
            tail = "bias" if kind not in MATRICES and kind.endswith("b") else "weight"
            found |= {f"blocks.{layer}.{part}.{tail}": value[layer, run] for layer in range(4)}
    return found


@pytest.mark.parametrize(
    ("schedule", "optimizer", "b1"), [("1f1b", "muon", 0.9), ("2bw", "muon", 0.9), ("2bw", "nadam", 0.99)]
)
def test_updates_are_those_of_torch(schedule: str, optimizer: str, b1: float) -> None:
    """Muon beside AdamW, with decay and rates; late by one, where the gradient is that of the weights before."""
    corpus, updates = load_corpus(), 3
    run = {"sched": schedule, "updates": updates, "seed": 1, "opt": optimizer, "b1": b1, "rate": 0.001}
    emulated = Batch([run], "cpu", corpus)
    model = GPT(GPTConfig(length=64, layers=4, width=128))
    begun = {name: value.clone() for name, value in _named(emulated.w, 0).items()}
    model.load_state_dict(begun)
    emulated.evaluate = lambda weights: torch.zeros(1)  # type: ignore[method-assign]
    emulated.run()
    optimizers = [one for one in make_optimizer(optimizer, lr=0.008, beta1=b1)(list(model.named_parameters())) if one]
    older: Any = None
    for update in range(updates):
        tokens, targets = corpus.batch(seed=1, step=update, batch_size=16, length=64)
        newest = {name: value.detach().clone() for name, value in model.named_parameters()}
        model.load_state_dict(newest if older is None or schedule == "1f1b" else older)
        model.zero_grad()
        loss_fn(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        model.load_state_dict(newest)
        older = newest
        for one in optimizers:
            for group in one.param_groups:
                group["lr"] = float(emulated.rate_table[update, 0])
            one.step()
    for name, expected in model.state_dict().items():  # bfloat16 within Muon; Adam makes a sign of what rounds to 0
        apart, moved = (float((expected - other[name]).norm()) for other in (_named(emulated.w, 0), begun))
        assert apart < (0.1 if name.startswith("blocks") and expected.ndim == 2 else 0.01) * moved, name
