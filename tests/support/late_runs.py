"""One-process emulation of late weights: runs of the convergence experiment's GPT at once, on a GPU or the CPU.

The gradient of update g is that of `every` microbatches, and microbatch i = g every + j uses at stage s of P the
version that the engine's rule gives: pipedream max(base, floor((i - (P - 1 - s)) / every)), 2bw max(base, g - 1), and
1f1b g. base is the last update behind which the pipeline was empty (the first one, flush_first, drains).

    python -m support.late_runs [SETTING ...]       within tests/; three seeds of each, else of the table's

A setting is JSON that changes some of DEFAULT:

    sched, P, every     schedule, ranks, microbatches an update
    opt, ns, b1         muon, of the blocks' matrices, with so many Newton-Schulz steps in bfloat16 (below 0 in
                        float32); adam, nadam of all weights, with that first momentum
    rate                peak rate
    factor, control     lambda of error feedback over the delay; lambda where nothing is late
    flush_first, drain  updates with a flush at first; an empty pipeline at each so many updates
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.inside import Corpus, learning_rate_curve, load_corpus

L, D, T, V, H, BATCH = 4, 128, 64, 256, 2, 16
SHAPES: dict[str, tuple[int, ...]] = {
    **{"tok": (V, D), "pos": (T, D), "head": (V, D), "nfw": (D,), "nfb": (D,)},
    **{"n1w": (D,), "n1b": (D,), "n2w": (D,), "n2b": (D,)},
    **{"qkvb": (3 * D,), "outb": (D,), "upb": (4 * D,), "downb": (D,)},
    **{"qkv": (3 * D, D), "out": (D, D), "up": (4 * D, D), "down": (D, 4 * D)},
}
ENDS, MATRICES = ("tok", "pos", "head", "nfw", "nfb"), ("qkv", "out", "up", "down")
DEFAULT: dict[str, Any] = {
    **{"sched": "pipedream", "P": 8, "every": 1, "opt": "muon", "ns": 5, "b1": 0.9, "rate": 0.008, "seed": 0},
    **{"factor": 0.0, "control": 0.0, "flush_first": 0, "drain": 0, "updates": 500},
}
TOGETHER = ("opt", "every", "ns", "b1")  # what runs of one batch share
BETA2, DECAY, MUON = 0.95, 0.1, 0.95

Weights = dict[str, Tensor]


def stage_of(kind: str, layer: int, ranks: int) -> int:
    """As the engine cuts the GPT of four blocks into 1, 2, 4 or 8 stages."""
    if kind in ("tok", "pos"):
        return 0
    if kind in ENDS:
        return ranks - 1
    if ranks == 8:
        second = kind in ("n2w", "n2b", "up", "upb", "down", "downb")
        if layer == 3 and second:
            return 7 if kind in ("down", "downb") else 6
        return 2 * layer + second
    return layer * ranks // 4


def init(seeds: Iterable[int], device: str) -> Weights:
    """[layers, runs, ...] by kind."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in SHAPES}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for kind, shape in SHAPES.items():
            whole = (1 if kind in ENDS else L, *shape)
            if len(shape) == 1:
                weight = torch.ones(whole) if kind in ("nfw", "n1w", "n2w") else torch.zeros(whole)
            else:
                deviation = 0.02 / math.sqrt(2 * L) if kind in ("out", "down") else 0.02
                weight = torch.randn(whole, generator=generator) * deviation
            found[kind].append(weight)
    return {kind: torch.stack(weights, 1).to(device) for kind, weights in found.items()}


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x [N, B*T, in], w [N, out, in]."""
    return torch.bmm(x, w.transpose(1, 2)) if b is None else torch.baddbmm(b[:, None], x, w.transpose(1, 2))


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addcmul(b[:, None], F.layer_norm(x, (D,)), w[:, None])


def forward(w: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of each run: tokens [N, B, T]; weights [L, N, ...]."""
    runs, sequences, _ = tokens.shape
    at = tokens.reshape(runs, -1, 1).expand(-1, -1, D)
    x = torch.gather(w["tok"][0], 1, at) + w["pos"][0].repeat(1, sequences, 1)
    for i in range(L):
        h = linear(norm(x, w["n1w"][i], w["n1b"][i]), w["qkv"][i], w["qkvb"][i])
        q, k, v = h.view(runs * sequences, T, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(runs, -1, D)
        x = x + linear(mixed, w["out"][i], w["outb"][i])
        h = F.gelu(linear(norm(x, w["n2w"][i], w["n2b"][i]), w["up"][i], w["upb"][i]), approximate="tanh")
        x = x + linear(h, w["down"][i], w["downb"][i])
    logits = linear(norm(x, w["nfw"][0], w["nfb"][0]), w["head"][0])
    return F.cross_entropy(logits.view(-1, V), targets.reshape(-1), reduction="none").view(runs, -1).mean(1)


def newton_schulz(g: Tensor, steps: int) -> Tensor:
    """As torch.optim.Muon has it; steps below 0: in float32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.reshape(-1, *g.shape[-2:]).to(torch.float32 if steps < 0 else torch.bfloat16)
    flips = g.shape[-2] > g.shape[-1]
    x = x.transpose(1, 2) if flips else x
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).to(x.dtype)
    for _ in range(abs(steps)):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if flips else x).reshape(g.shape).float()


class Batch:
    """Runs that share what TOGETHER names."""

    def __init__(self, runs: Sequence[Mapping[str, Any]], device: str, corpus: Corpus | None) -> None:
        self.runs, self.device, self.corpus = [{**DEFAULT, **run} for run in runs], device, corpus
        self.every, self.opt, self.ns, self.b1 = (self.runs[0][key] for key in ("every", "opt", "ns", "b1"))
        self.updates = max(run["updates"] for run in self.runs)
        self.w = init([run["seed"] for run in self.runs], device)
        reach = {kind: self._reach(kind, w.shape[0]) for kind, w in self.w.items()}
        delay = {kind: one / self.every for kind, one in reach.items()}
        self.R = 2 + max(1, *(math.ceil(float(one.max())) for one in delay.values()))  # of the ring of versions
        self.history = {kind: w[None].repeat(self.R, *[1] * w.ndim) for kind, w in self.w.items()}
        self.state: dict[tuple[str, str], Tensor] = {}
        factor, control = (torch.tensor([float(run[key]) for run in self.runs]) for key in ("factor", "control"))
        self.feedback = {kind: torch.maximum(factor * one, control).to(device) for kind, one in delay.items()}
        self.corrects = any(bool((one != 0).any()) for one in self.feedback.values())
        self.reach = {kind: one.to(device) for kind, one in reach.items()}
        self._make_tables()

    def _reach(self, kind: str, layers: int) -> Tensor:
        """[layers, runs]: microbatches by which a version is older."""

        def of(run: Mapping[str, Any], layer: int) -> int:
            late = {"1f1b": 0, "2bw": self.every}
            return late.get(run["sched"], run["P"] - 1 - stage_of(kind, layer, run["P"]))

        return torch.tensor([[of(run, layer) for run in self.runs] for layer in range(layers)])

    def _make_tables(self) -> None:
        """[updates, runs]: rates, updates with an empty pipeline, and whether nothing is late."""
        size = self.updates, len(self.runs)
        self.rates, base, fresh = torch.zeros(size), torch.zeros(size, dtype=torch.long), torch.zeros(size).bool()
        for n, run in enumerate(self.runs):
            curve = learning_rate_curve(run["updates"])
            for g in range(run["updates"]):
                self.rates[g, n] = run["rate"] * curve(g)
                empty = g <= run["flush_first"] or (run["drain"] and g % run["drain"] == 0)
                base[g, n] = g if empty else base[g - 1, n]
                fresh[g, n] = g < run["flush_first"]
        self.rate_table, self.base, self.fresh = (one.to(self.device) for one in (self.rates, base, fresh))

    def versions(self, g: int) -> dict[str, Tensor]:
        """[layers, runs, every] by kind: the version's place in the ring."""
        microbatch = g * self.every + torch.arange(self.every, device=self.device)
        found = {}
        for kind, reach in self.reach.items():
            version = torch.div(microbatch - reach[:, :, None], self.every, rounding_mode="floor").clamp(max=g)
            found[kind] = torch.maximum(version, self.base[g][None, :, None]) % self.R
        return found

    def _load(self) -> tuple[Tensor, Tensor]:
        """[seeds, updates, 2, BATCH, T]: tokens and targets; [runs]: which seed."""
        assert self.corpus is not None
        seeds = sorted({run["seed"] for run in self.runs})
        data = []
        for seed in seeds:
            steps = [self.corpus.batch(seed=seed, step=i, batch_size=BATCH, length=T) for i in range(self.updates)]
            data.append(torch.stack([torch.stack([one.tokens, one.targets]) for one in steps]))
        which = torch.tensor([seeds.index(run["seed"]) for run in self.runs], device=self.device)
        return torch.stack(data).to(self.device), which

    def run(self) -> list[float]:
        """Loss of each run behind its own last update."""
        data, which = self._load()
        runs = torch.arange(len(self.runs), device=self.device)[None, :, None]
        lasts = torch.zeros(len(self.runs))
        for g in range(self.updates):
            places, used = self.versions(g), {}
            for kind, w in self.w.items():
                layers = torch.arange(w.shape[0], device=self.device)[:, None, None]
                used[kind] = self.history[kind][places[kind], layers, runs].flatten(1, 2).requires_grad_()
            batch = data[which, g]  # [runs, 2, BATCH, T]
            tokens, targets = (batch[:, i].reshape(-1, BATCH // self.every, T) for i in (0, 1))
            gradients = torch.autograd.grad(forward(used, tokens, targets).sum(), list(used.values()))
            with torch.no_grad():
                for kind, gradient in zip(used, gradients, strict=True):
                    self._step(kind, gradient.unflatten(1, (-1, self.every)).mean(2), g)
                    self.history[kind][(g + 1) % self.R].copy_(self.w[kind])
            ends = [n for n, run in enumerate(self.runs) if run["updates"] == g + 1]
            if ends:
                lasts[ends] = self.evaluate({kind: w[:, ends] for kind, w in self.w.items()}).cpu()
        return lasts.tolist()

    @torch.no_grad()
    def evaluate(self, w: Weights) -> Tensor:
        assert self.corpus is not None
        batches = self.corpus.validation_batches(num_batches=16, batch_size=32, length=T)
        shown = (w["pos"].shape[1], -1, -1)
        losses = [forward(w, *(one.to(self.device).expand(shown) for one in pair)) for pair in batches]
        return torch.stack(losses).mean(0)

    def _step(self, kind: str, gradient: Tensor, g: int) -> None:
        w, state = self.w[kind], self.state
        per = (..., *[None] * (w.ndim - 2))
        rate = self.rate_table[g][None][per]
        update = self._update(kind, gradient, g)
        if w.ndim > 3:
            w.mul_(1 - rate * DECAY)
        if self.corrects:
            steady = self.feedback[kind]
            factor = torch.where(self.fresh[g][None], (steady > 0).float(), steady)[per]
            last = state.get((kind, "last"), update)
            state[kind, "last"] = update
            update = update + factor * (update - last)
        w.sub_(rate * update)

    def _update(self, kind: str, gradient: Tensor, g: int) -> Tensor:
        state = self.state
        if (kind, "m") not in state:
            state[kind, "m"], state[kind, "v"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        m, v = state[kind, "m"], state[kind, "v"]
        if self.opt == "muon" and kind in MATRICES:
            m.lerp_(gradient, 1 - MUON)
            scale = 0.2 * math.sqrt(max(gradient.shape[-2:]))
            return newton_schulz(torch.lerp(gradient, m, MUON), self.ns) * scale
        b1 = self.b1
        m.lerp_(gradient, 1 - b1)
        v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        mean = m / (1 - b1 ** (g + 1))
        if self.opt == "nadam":
            mean = b1 * m / (1 - b1 ** (g + 2)) + (1 - b1) * gradient / (1 - b1 ** (g + 1))
        return mean / ((v / (1 - BETA2 ** (g + 1))).sqrt() + 1e-8)


def table() -> list[dict[str, Any]]:
    """Rows of experiments/results/convergence."""
    late = {"sched": "2bw", "factor": 2.0, "flush_first": 150}
    pairs = [{"sched": "1f1b"}, late]
    rows = [*pairs, {"sched": "1f1b", "control": 1.0}, {"sched": "2bw", "factor": 2.0}]
    rows += [{"P": 4, "every": 4, "factor": 2.0}, {"every": 8, "factor": 2.0, "flush_first": 150}]
    rows += [{"every": 8, "factor": factor} for factor in (0.0, 1.0, 2.0, 3.0)]
    rows += [{"every": 4, "factor": 1.0}, {"every": 4, "factor": 2.0, "flush_first": 150}, {"every": 2, "factor": 1.0}]
    rows += [{"P": 4, "rate": 0.004, "factor": 1.0, "drain": 50}, {"factor": 1.0, "drain": 50}]
    for updates in (1000, 2000):
        longer = [{"sched": "1f1b"}, {"sched": "1f1b", "control": 1.0}, {"sched": "2bw", "factor": 2.0}]
        longer += [{"P": ranks, "rate": 0.004, "factor": 1.0} for ranks in (4, 8)]
        rows += [{**row, "updates": updates} for row in longer]
    rows += [{"every": 8, "factor": factor, "updates": 1000} for factor in (1.0, 2.0)]
    return rows + [{**row, "ns": ns} for ns in (-5, 4, 3, 2, 1) for row in pairs]


def main(given: Sequence[str]) -> None:
    """Print the losses of three seeds of each setting; runs that go together are one batch."""
    rows = [json.loads(setting) for setting in given] or table()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    device, corpus = "cuda" if torch.cuda.is_available() else "cpu", load_corpus()
    batches: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        batches.setdefault(tuple({**DEFAULT, **row}[key] for key in TOGETHER), []).append(row)
    for part in batches.values():
        losses = Batch([{**row, "seed": seed} for row in part for seed in range(3)], device, corpus).run()
        for n, row in enumerate(part):
            found = losses[3 * n : 3 * n + 3]
            print(f"{sum(found) / 3:.3f}", [round(loss, 3) for loss in found], json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
