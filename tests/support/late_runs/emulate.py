"""One-process emulation of late weights: K runs of the convergence experiment's GPT at once, on a GPU or the CPU.

The gradient of update g is that of `every` microbatches, and microbatch i = g every + j uses at stage s of P the
version that the engine's rule gives: pipedream max(base, floor((i - (P - 1 - s)) / every)), 2bw max(base, g - 1), and
1f1b g. base is the last update behind which the pipeline was empty (the first one, flush_first, drains).

A setting changes some of DEFAULT:

    sched, P, every     schedule, ranks, microbatches an update
    opt                 of the blocks' matrices: muon; soap: Adam in the eigenbasis of E[G G'] on the side of the width,
                        as basis rotation does; adam, nadam (which are those of all weights)
    rate, warmup, final, shape, ends      peak, share that rises, last part, power of the cosine, rate of the others
    factor, power, cap, lam_min           lambda of error feedback: max(lam_min, min(cap, factor delay^power))
    fresh, ends_ef, ef_beta               lambda under flush_first; part for the ends; smoothing of the last update
    lrpow, lrfade       rates by (1 + delay)^-lrpow, until that part of the updates
    mom, momd, kappa, kappa_d             Muon's momentum, less by delay; Nesterov's share, more by delay
    ns                  Newton-Schulz steps in bfloat16; below 0 in float32
    ema                 weights are averaged for the last loss
    flush_first, drain  updates with a flush at first; an empty pipeline at each so many updates
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

L, D, T, V, H, BATCH = 4, 128, 64, 256, 2, 16
MATRICES = ("qkv", "out", "up", "down")
SHAPES = {
    "tok": (V, D),
    "pos": (T, D),
    "head": (V, D),
    "nfw": (D,),
    "nfb": (D,),
    "n1w": (D,),
    "n1b": (D,),
    "n2w": (D,),
    "n2b": (D,),
    "qkvb": (3 * D,),
    "outb": (D,),
    "upb": (4 * D,),
    "downb": (D,),
    "qkv": (3 * D, D),
    "out": (D, D),
    "up": (4 * D, D),
    "down": (D, 4 * D),
}
LAYERED = [k for k in SHAPES if k not in ("tok", "pos", "head", "nfw", "nfb")]
DEFAULT: dict[str, Any] = {
    "sched": "pipedream",
    "P": 8,
    "every": 1,
    "opt": "muon",
    "rate": 0.008,
    "seed": 0,
    "factor": 0.0,
    "power": 1.0,
    "cap": 99.0,
    "lrpow": 0.0,
    "lrfade": 0.0,
    "mom": 0.95,
    "kappa": -1.0,
    "kappa_d": 0.0,
    "warmup": 0.1,
    "final": 0.05,
    "shape": 1.0,
    "ends": 1.0,
    "flush_first": 0,
    "drain": 0,
    "updates": 500,
    "ns": 5,
    "b1": 0.9,
    "b2": 0.95,
    "lam_min": 0.0,
    "fresh": 1.0,
    "ema": 0.0,
    "ends_ef": 1.0,
    "ef_beta": 0.0,
    "wd": 0.1,
    "qfreq": 10,
    "momd": 0.0,
}


CACHE = {}


def stage_of(kind, layer, P):
    """As the engine cuts the GPT of four blocks into 1, 2, 4 or 8 stages."""
    if kind in ("tok", "pos"):
        return 0
    if kind in ("head", "nfw", "nfb"):
        return P - 1
    if P == 8:
        second = kind in ("n2w", "n2b", "up", "upb", "down", "downb")
        if layer == 3 and second:
            return 7 if kind in ("down", "downb") else 6
        return 2 * layer + second
    return layer * P // 4


def init(seeds, dev):
    out = {k: [] for k in SHAPES}
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        for k, shape in SHAPES.items():
            n = (L, *shape) if k in LAYERED else (1, *shape)
            if k in ("nfw", "n1w", "n2w"):
                w = torch.ones(n)
            elif len(shape) == 1:
                w = torch.zeros(n)
            else:
                std = 0.02 / math.sqrt(2 * L) if k in ("out", "down") else 0.02
                w = torch.randn(n, generator=g) * std
            out[k].append(w)
    return {k: torch.stack(v, 1).to(dev) for k, v in out.items()}  # [L or 1, K, ...]


def lin(x, w, b=None):  # x [N, B*T, in], w [N, out, in]
    return torch.bmm(x, w.transpose(1, 2)) if b is None else torch.baddbmm(b[:, None], x, w.transpose(1, 2))


def norm(x, w, b):
    return torch.addcmul(b[:, None], F.layer_norm(x, (D,)), w[:, None])


def forward(w, tokens, targets):
    """Mean loss of each run: tokens [N, B, T]; weights [L, N, ...]."""
    N, B, _ = tokens.shape
    at = tokens.reshape(N, B * T)
    x = torch.gather(w["tok"][0], 1, at[:, :, None].expand(-1, -1, D)) + w["pos"][0].repeat(1, B, 1)
    for l in range(L):
        h = lin(norm(x, w["n1w"][l], w["n1b"][l]), w["qkv"][l], w["qkvb"][l])
        q, k, v = h.view(N * B, T, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        m = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(N, B * T, D)
        x = x + lin(m, w["out"][l], w["outb"][l])
        h = F.gelu(lin(norm(x, w["n2w"][l], w["n2b"][l]), w["up"][l], w["upb"][l]), approximate="tanh")
        x = x + lin(h, w["down"][l], w["downb"][l])
    logits = lin(norm(x, w["nfw"][0], w["nfb"][0]), w["head"][0])
    loss = F.cross_entropy(logits.view(-1, V), targets.reshape(-1), reduction="none")
    return loss.view(N, -1).mean(1)


def newton_schulz(g, steps, dtype=torch.bfloat16):
    a, b, c = 3.4445, -4.7750, 2.0315
    shape = g.shape
    x = g.reshape(-1, *shape[-2:]).to(dtype)
    flip = shape[-2] > shape[-1]
    if flip:
        x = x.transpose(1, 2)
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).to(dtype)
    for _ in range(steps):
        m = torch.bmm(x, x.transpose(1, 2))
        u = torch.baddbmm(m, m, m, beta=b, alpha=c)
        x = torch.baddbmm(x, u, x, beta=a)
    return (x.transpose(1, 2) if flip else x).reshape(shape).float()


def orth(x):
    """Q of a nearly orthogonal x, by Cholesky."""
    x = x / x.norm(dim=-2, keepdim=True).clamp(min=1e-12)
    for _ in range(2):
        gram = x.transpose(-1, -2) @ x
        gram = gram + 1e-5 * torch.eye(gram.shape[-1], device=x.device)
        chol, info = torch.linalg.cholesky_ex(gram)
        new = torch.linalg.solve_triangular(chol.transpose(-1, -2), x, upper=True, left=False)
        x = torch.where(
            (info == 0)[..., None, None] & new.isfinite().all(-1, keepdim=True).all(-2, keepdim=True), new, x
        )
    return x


class Batch:
    """K runs that share optimizer, microbatches an update, updates and Newton-Schulz steps."""

    def __init__(self, runs, dev, corpus):
        self.runs, self.dev, self.corpus = [{**DEFAULT, **r} for r in runs], dev, corpus
        self.K, r0 = len(runs), self.runs[0]
        self.every, self.opt, self.updates, self.ns = r0["every"], r0["opt"], r0["updates"], r0["ns"]
        assert all(
            (r["every"], r["opt"], r["updates"], r["ns"], r["qfreq"])
            == (self.every, self.opt, self.updates, self.ns, r0["qfreq"])
            for r in self.runs
        )
        self.w = init([r["seed"] for r in self.runs], dev)
        self.delay = {
            k: torch.tensor([[self._delay(r, k, l) for r in self.runs] for l in range(L if k in LAYERED else 1)])
            for k in SHAPES
        }
        self.R = 2 + max(1, *(math.ceil(float(v.max())) for v in self.delay.values()))
        self.hist = {k: w[None].repeat(self.R, *[1] * w.ndim) for k, w in self.w.items()}
        self.s = {}
        self.ema = {k: w.clone() for k, w in self.w.items()} if any(r["ema"] for r in self.runs) else None
        self.col = lambda name: self.cols[name]
        f, p, c, m = (torch.tensor([float(r[n]) for r in self.runs]) for n in ("factor", "power", "cap", "lam_min"))
        ee = torch.tensor([float(r["ends_ef"]) for r in self.runs])
        self.lam = {k: torch.minimum(f * d**p, c) * (d > 0) for k, d in self.delay.items()}
        self.lam = {k: torch.maximum(v, m) * (1.0 if k in MATRICES else ee) for k, v in self.lam.items()}
        self.has_ef = any(bool((v != 0).any()) for v in self.lam.values())
        self.lam = {k: v.to(dev) for k, v in self.lam.items()}
        self.has_ema_ef = any(r["ef_beta"] for r in self.runs)
        self.has_lrpow = any(r["lrpow"] for r in self.runs)
        self.tables()

    def _delay(self, r, k, l):
        return {"1f1b": 0.0, "2bw": 1.0}.get(r["sched"], (r["P"] - 1 - stage_of(k, l, r["P"])) / r["every"])

    def tables(self):
        """What depends on the update alone: [updates, K] rates, bases and freshness; [layers, K] reaches by kind."""
        U, K = self.updates, self.K
        rates, base, fresh = torch.zeros(U, K), torch.zeros(U, K, dtype=torch.long), torch.zeros(U, K, dtype=torch.bool)
        for n, r in enumerate(self.runs):
            w = max(1, round(r["warmup"] * U)) if r["warmup"] else 0
            b = 0
            for g in range(U):
                done = min(1.0, (g - w) / max(1, U - w))
                f = (
                    (g + 1) / (w + 1)
                    if g < w
                    else r["final"] + (1 - r["final"]) * (0.5 * (1 + math.cos(math.pi * done))) ** r["shape"]
                )
                rates[g, n] = r["rate"] * f
                if g <= r["flush_first"] or (r["drain"] and g % r["drain"] == 0):
                    b = g
                base[g, n], fresh[g, n] = b, g < r["flush_first"]
        dev = self.dev
        self.rate_table, self.base_table, self.fresh_table = rates.to(dev), base.to(dev), fresh.to(dev)
        self.any_fresh = [bool(x.any()) for x in fresh]
        self.reach = {
            k: torch.tensor(
                [
                    [
                        {"1f1b": 0, "2bw": r["every"]}.get(r["sched"], r["P"] - 1 - stage_of(k, l, r["P"]))
                        for r in self.runs
                    ]
                    for l in range(w.shape[0])
                ],
                device=dev,
            )
            for k, w in self.w.items()
        }
        self.delay_dev = {k: v.to(dev) for k, v in self.delay.items()}
        self.ends = torch.tensor([r["ends"] if self.opt in ("muon", "soap") else 1.0 for r in self.runs], device=dev)
        self.cols = {
            n: torch.tensor([float(r[n]) for r in self.runs], device=dev) for n in DEFAULT if n not in ("sched", "opt")
        }

    def versions(self, g):
        """[L, K, every] by kind: the version's place in the ring."""
        E = self.every
        j = torch.arange(E, device=self.dev)
        base = self.base_table[g][None, :, None]
        found = {}
        for k, reach in self.reach.items():
            v = torch.div(g * E + j - reach[:, :, None], E, rounding_mode="floor").clamp(max=g)
            found[k] = torch.maximum(v, base) % self.R
        return found

    def load(self):
        """All bytes of the runs: [seed][updates, BATCH, T+1]."""
        seeds = sorted({r["seed"] for r in self.runs})
        data = {}
        for seed in seeds:
            if (seed, self.updates) in CACHE:
                data[seed] = CACHE[seed, self.updates]
                continue
            parts = [self.corpus.batch(seed=seed, step=i, batch_size=BATCH, length=T) for i in range(self.updates)]
            data[seed] = CACHE[seed, self.updates] = torch.stack(
                [torch.stack([p.tokens, p.targets]) for p in parts]
            ).to(self.dev)  # [U, 2, B, T]
        self.which = torch.tensor([seeds.index(r["seed"]) for r in self.runs], device=self.dev)
        self.data = torch.stack([data[s] for s in seeds])  # [S, U, 2, B, T]
        val = self.corpus.validation_batches(num_batches=16, batch_size=32, length=T)
        self.val = [(b.tokens.to(self.dev), b.targets.to(self.dev)) for b in val]

    def run(self, deadline=None):
        self.load()
        K, E, dev = self.K, self.every, self.dev
        for g in range(self.updates):
            fresh = self.fresh_table[g] if self.any_fresh[g] else None
            idx = self.versions(g)
            ks = torch.arange(K, device=dev)[None, :, None]
            used = {}
            for k, w in self.w.items():
                ls = torch.arange(w.shape[0], device=dev)[:, None, None]
                used[k] = self.hist[k][idx[k], ls, ks].flatten(1, 2).requires_grad_()  # [L, K*E, ...]
            batch = self.data[self.which, g]  # [K, 2, B, T]
            tokens, targets = (batch[:, i].reshape(K * E, BATCH // E, T) for i in (0, 1))
            loss = forward(used, tokens, targets)
            grads = torch.autograd.grad(loss.sum(), list(used.values()))
            with torch.no_grad():
                grads = {k: v.unflatten(1, (K, E)).mean(2) if E > 1 else v for k, v in zip(used, grads, strict=True)}
                self.step(g, grads, fresh)
                for k, w in self.w.items():
                    self.hist[k][(g + 1) % self.R].copy_(w)
            if deadline and time.time() > deadline:
                return None
        out = self.evaluate(self.w)
        if self.ema is not None:
            self.ema_loss = self.evaluate(self.ema)
        return out

    @torch.no_grad()
    def evaluate(self, w):
        total = torch.zeros(self.K, device=self.dev)
        for tokens, targets in self.val:
            total += forward(w, tokens.expand(self.K, -1, -1), targets.expand(self.K, -1, -1))
        return total / len(self.val)

    def step(self, g, grads, fresh):
        rate, C = self.rate_table[g], self.col
        if self.has_lrpow:
            fade = torch.where(
                C("lrfade") > 0, (1 - g / (C("lrfade") * self.updates).clamp(min=1e-9)).clamp(min=0), 1.0
            )
        for k, w in self.w.items():
            per = (slice(None), slice(None)) + (None,) * (w.ndim - 2)
            lr = (
                rate[None] * (1 + self.delay_dev[k]) ** (-C("lrpow") * fade)
                if self.has_lrpow
                else rate[None].expand(w.shape[0], -1)
            )
            if k not in MATRICES:
                lr = lr * self.ends
            lr = lr[per]
            gr = grads[k]
            upd = self.update(k, gr, g, per)
            if k in MATRICES or k in ("tok", "pos", "head"):
                w.mul_(1 - lr * C("wd")[None].expand(w.shape[0], -1)[per])
            if self.has_ef:
                last = self.s.get((k, "last"))
                lam = (
                    self.lam[k]
                    if fresh is None
                    else torch.where(fresh[None], torch.where(self.lam[k] > 0, C("fresh")[None], 0.0), self.lam[k])
                )[per]
                if last is None:
                    self.s[k, "last"] = upd.clone()
                    new = upd
                else:
                    new = upd + lam * (upd - last)
                    if self.has_ema_ef:
                        last.lerp_(upd, 1 - C("ef_beta")[None].expand(w.shape[0], -1)[per])
                    else:
                        last.copy_(upd)
                upd = new
            w.addcmul_(lr.expand_as(w), upd, value=-1.0)
            if self.ema is not None:
                self.ema[k].lerp_(w, 1 - C("ema")[None].expand(w.shape[0], -1)[per])

    def update(self, k, gr, g, per):
        C, s = self.col, self.s

        def ex(name: str) -> Tensor:
            return C(name)[None].expand(gr.shape[0], -1)[per]

        if self.opt == "muon" and k in MATRICES:
            if (k, "m") not in s:
                s[k, "m"] = torch.zeros_like(gr)
            mom = (C("mom")[None] ** (1 / (1 + C("momd")[None] * self.delay_dev[k])))[per]
            s[k, "m"].mul_(mom).add_(gr * (1 - mom))
            kap = (
                torch.where(C("kappa")[None] < 0, 1 - C("mom")[None], C("kappa")[None])
                + C("kappa_d")[None] * self.delay_dev[k]
            )
            m = s[k, "m"] + kap[per] * (gr - s[k, "m"])
            return newton_schulz(m, abs(self.ns), torch.float32 if self.ns < 0 else torch.bfloat16) * (
                0.2 * math.sqrt(max(gr.shape[-2:]))
            )
        if self.opt == "soap" and k in MATRICES:
            return self.soap(k, gr, g, ex)
        b1, b2 = (ex("b1"), ex("b2")) if self.opt != "muon" else (0.9, 0.95)
        if (k, "m") not in s:
            s[k, "m"], s[k, "v"] = torch.zeros_like(gr), torch.zeros_like(gr)
        m, v = s[k, "m"], s[k, "v"]
        m.mul_(b1).add_(gr * (1 - b1))
        v.mul_(b2).add_(gr * gr * (1 - b2))
        if self.opt == "nadam":  # constant momentum
            mh = b1 * m / (1 - b1 ** (g + 2)) + (1 - b1) * gr / (1 - b1 ** (g + 1))
        else:
            mh = m / (1 - b1 ** (g + 1))
        return mh / ((v / (1 - b2 ** (g + 1))).sqrt() + 1e-8)

    def soap(self, k, gr, g, ex):
        """Adam in the eigenbasis of the smaller side(s): E[G^T G] or E[G G^T], by power iteration."""
        s, b1, b2 = self.s, ex("b1"), ex("b2")
        sides = {"qkv": "R", "up": "R", "down": "L", "out": "LR"}[k]
        eye = torch.eye(D, device=self.dev).expand(*gr.shape[:2], D, D)
        if (k, "m") not in s:
            s[k, "m"], s[k, "v"] = torch.zeros_like(gr), torch.zeros_like(gr)
            for side in sides:
                s[k, side], s[k, "Q" + side] = torch.zeros_like(eye), eye.clone()
        for side in sides:
            cov = gr.transpose(-1, -2) @ gr if side == "R" else gr @ gr.transpose(-1, -2)
            s[k, side].mul_(b2).add_(cov * (1 - b2))
            if g < 20 or g % self.runs[0]["qfreq"] == 0:
                s[k, "Q" + side] = orth(s[k, side] @ s[k, "Q" + side])

        def rot(x, back=False):
            for side in sides:
                q = s[k, "Q" + side]
                if side == "R":
                    x = x @ (q.transpose(-1, -2) if back else q)
                else:
                    x = (q if back else q.transpose(-1, -2)) @ x
            return x

        m, v = s[k, "m"], s[k, "v"]
        m.mul_(b1).add_(gr * (1 - b1))
        rg = rot(gr)
        v.mul_(b2).add_(rg * rg * (1 - b2))
        return rot((rot(m) / (1 - b1 ** (g + 1))) / ((v / (1 - b2 ** (g + 1))).sqrt() + 1e-8), back=True)


def go(runs, dev, corpus, deadline=None, size=128):
    """Losses of runs, in batches of those that fit together; None where time was out."""
    groups = {}
    for n, r in enumerate(runs):
        full = {**DEFAULT, **r}
        groups.setdefault((full["opt"], full["every"], full["updates"], full["ns"], full["qfreq"]), []).append(n)
    out = [None] * len(runs)
    todo = [(key, ns[at : at + size]) for key, ns in groups.items() for at in range(0, len(ns), size)]
    while todo:
        key, part = todo.pop(0)
        begun = time.time()
        try:
            b = Batch([runs[n] for n in part], dev, corpus)
            found = b.run(deadline)
            if found is None:
                return out
            values = found.tolist()
            emas = b.ema_loss.tolist() if b.ema is not None else [None] * len(part)
        except torch.OutOfMemoryError:
            print(f"# {key} {len(part)} runs: out of memory", flush=True)
            b = found = None
            torch.cuda.empty_cache()
            todo[:0] = [(key, part[: len(part) // 2]), (key, part[len(part) // 2 :])]
            continue
        print(f"# {key} {len(part)} runs, {time.time() - begun:.1f} s, {deadline - time.time():.0f} s left", flush=True)
        for n, value, e in zip(part, values, emas, strict=True):
            out[n] = value if e is None or not runs[n].get("ema") else min(value, e)
        del b
    return out
