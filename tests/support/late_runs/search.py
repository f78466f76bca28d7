"""Search over corrections of late gradients until the time is over, three seeds of the best along the way.

python -m support.late_runs.search muon|every|others|longer SECONDS FOLDER [RUNS AT ONCE]      within tests/
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time

import torch

from support.inside import load_corpus

from .emulate import DEFAULT, go

which, seconds, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3]
SIZE = int(sys.argv[4]) if len(sys.argv) > 4 else 128
UPDATES = int(os.environ.get("UPDATES", "500"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
deadline = time.time() + seconds
corpus = load_corpus()
os.makedirs(folder, exist_ok=True)
log = open(  # noqa: SIM115
    f"{folder}/{which}.jsonl", "a"
)
rnd = random.Random(which)
SEARCH = 3  # seed of searches; figures are of seeds 0, 1, 2


def logu(a, b):
    return lambda: round(math.exp(rnd.uniform(math.log(a), math.log(b))), 5)


def uni(a, b):
    return lambda: round(rnd.uniform(a, b), 4)


def pick(*values):
    return lambda: rnd.choice(values)


RATE = {"rate": logu(0.0015, 0.02)}
CURVE = {"warmup": uni(0.05, 0.4), "shape": uni(0.6, 2.0), "ends": logu(0.1, 2.0)}
MOM = {"mom": pick(0.8, 0.9, 0.93, 0.95, 0.97), "momd": pick(0.0, 0.0, 0.1, 0.3, 1.0)}
EF = {"factor": logu(0.1, 4.0), "power": pick(0.0, 0.5, 1.0), "ends_ef": pick(0.0, 0.5, 1.0)}
SMOOTH = {"ef_beta": pick(0.5, 0.7, 0.8, 0.9, 0.95)}
SYNC_EF = {"lam_min": logu(0.2, 4.0), "ends_ef": pick(0.0, 1.0)}
LR = {"lrpow": uni(0.1, 1.2), "lrfade": pick(0.0, 0.3, 1.0)}
KAPPA = {"kappa": pick(0.02, 0.05, 0.1, 0.2, 0.4), "kappa_d": pick(0.0, 0.01, 0.03, 0.1, 0.2)}
BETAS = {"b1": pick(0.8, 0.9, 0.95, 0.98), "b2": pick(0.9, 0.95, 0.98, 0.99)}
EMA = {"ema": pick(0.0, 0.9, 0.95, 0.97)}


def children(found, knobs, size, turn, elite=6):
    """Random settings at first; then crossed and changed ones of the best."""
    runs = []
    found = sorted(found, key=lambda one: one[0])
    while len(runs) < size:
        child = {k: draw() for k, draw in knobs.items()}
        if turn and found:
            mother, father = (rnd.choice(found[:elite])[1] for _ in range(2))
            for k in knobs:
                if rnd.random() < 0.85:
                    value = (mother if rnd.random() < 0.6 else father).get(k, DEFAULT[k])
                    if k in ("rate", "factor", "ends", "lam_min") and rnd.random() < 0.5:
                        value = round(value * math.exp(rnd.gauss(0, 0.25)), 5)
                    elif k in ("warmup", "shape", "lrpow") and rnd.random() < 0.4:
                        value = round(max(0.01, value + rnd.gauss(0, 0.1)), 4)
                    child[k] = value
        runs.append(child)
    return runs


def campaign(families, turns=99, rows=()):
    """Search in all families at once; the best of each, so far, with three seeds along the way.

    families: (name, fixed, knobs, how many a turn, starts); rows: (name, setting) to be had with three seeds at once.
    """
    found, settled, slowest = {f[0]: [] for f in families}, {}, 0.0
    rows = list(rows)
    for turn in range(turns):
        begun = time.time()
        if deadline - begun < 1.15 * slowest + 3:
            break
        runs, names = [], []
        for name, r in rows:
            for seed in (0, 1, 2):
                runs.append({**r, "seed": seed})
                names.append((name, False))
        rows = []
        for name, fixed, knobs, size, starts in families:
            own = [dict(x) for x in starts] if not turn else []
            own += children(found[name], knobs, size - len(own), turn)
            runs += [{**fixed, **r, "seed": SEARCH} for r in own]
            names += [(name, True)] * len(own)
            best = sorted(found[name], key=lambda one: one[0])[:1]
            for _, r in best:
                key = (name, json.dumps(r))
                if key not in settled:
                    settled[key] = True
                    runs += [{**r, "seed": seed} for seed in (0, 1, 2)]
                    names += [(name, False)] * 3
        measured = measure_named(runs, names)
        groups = {}
        for (name, is_search), loss, r in measured:
            if is_search:
                found[name].append((loss, r))
            else:
                groups.setdefault((name, json.dumps({k: v for k, v in r.items() if k != "seed"})), []).append(loss)
        for (name, r), losses in sorted(groups.items()):
            print("SEEDS", name, [round(x, 3) for x in losses], f"mean {sum(losses) / len(losses):.4f}", r, flush=True)
        slowest = max(slowest, time.time() - begun)


def measure_named(runs, names):
    runs = [{"updates": UPDATES, **r} for r in runs]
    losses = go(runs, dev, corpus, deadline, SIZE)
    out = []
    for r, loss, name in zip(runs, losses, names, strict=True):
        if loss is not None:
            loss = loss if math.isfinite(loss) else 99.0
            log.write(json.dumps({"family": name[0], "search": name[1], "loss": round(loss, 4), **r}) + "\n")
            out.append((name, loss, r))
    log.flush()
    return out


def n(share):
    return max(1, round(share * SIZE))


ALL = {**RATE, **CURVE, **MOM, **EF, **SMOOTH, **LR, **KAPPA, **EMA}
A = [{"rate": 0.008}, {"rate": 0.004}]
if which == "muon":
    f = {"P": 8}
    campaign(
        [
            ("1f1b", {"sched": "1f1b"}, {**RATE, **CURVE, **MOM, **KAPPA, **SYNC_EF, **EMA}, n(0.12), A),
            ("P=8 all", f, ALL, n(0.26), []),
            ("P=8 plain", f, {**RATE, **CURVE}, n(0.07), A),
            ("P=8 feedback", f, {**RATE, **CURVE, **EF}, n(0.12), [{"rate": 0.004, "factor": 1.0}]),
            ("P=8 smooth feedback", f, {**RATE, **CURVE, **EF, **SMOOTH}, n(0.12), []),
            ("P=8 rate by delay", f, {**RATE, **CURVE, **LR}, n(0.08), []),
            ("P=8 momentum and Nesterov's share by delay", f, {**RATE, **CURVE, **MOM, **KAPPA}, n(0.1), []),
            ("P=4 all", {"P": 4}, ALL, n(0.08), [{"rate": 0.004, "factor": 1.0}]),
            (
                "2bw all",
                {"sched": "2bw"},
                {**RATE, **CURVE, **MOM, **EF, **SMOOTH, **KAPPA, **EMA},
                n(0.08),
                [{"rate": 0.008, "factor": 2.0}],
            ),
        ],
        rows=[
            ("known: pipedream P=8, feedback 1, drained every 50", {"P": 8, "factor": 1.0, "drain": 50}),
            ("known: pipedream P=4, feedback 1, drained every 50", {"P": 4, "rate": 0.004, "factor": 1.0, "drain": 50}),
            ("known: 1f1b", {"sched": "1f1b"}),
            ("known: 1f1b, feedback 1", {"sched": "1f1b", "lam_min": 1.0}),
            ("known: 2bw, feedback 2, flush_first 150", {"sched": "2bw", "factor": 2.0, "flush_first": 150}),
            ("known: 2bw, feedback 2", {"sched": "2bw", "factor": 2.0}),
        ],
    )
if which == "every":
    for every in (8, 4, 2):
        f = {"P": 8, "every": every}
        rows = []
        for rate in (0.008, 0.012):
            rows += [(f"P=8 every {every}, plain", {**f, "rate": rate})]
            rows += [(f"P=8 every {every}, feedback {x}", {**f, "rate": rate, "factor": x}) for x in (1.0, 2.0, 3.0)]
        if every > 2:
            rows += [
                (
                    f"P=8 every {every}, feedback 2, flush_first {x}",
                    {**f, "rate": 0.008, "factor": 2.0, "flush_first": x},
                )
                for x in (50, 150)
            ]
        if every == 8:
            rows += [(f"P=4 every 4, feedback {x}", {"P": 4, "every": 4, "factor": x}) for x in (1.0, 2.0)]
        campaign(
            [(f"P=8 every {every}, searched", f, {**RATE, **CURVE, **EF}, n(0.3), [])],
            turns=2 if every > 2 else 3,
            rows=rows,
        )
if which == "others":
    R = {"rate": logu(0.0005, 0.01)}
    for opt in ("soap", "adam", "nadam"):
        betas = {**BETAS, "b1": pick(0.95, 0.98, 0.99)} if opt == "nadam" else BETAS
        knobs = {**R, **CURVE, **betas}
        campaign(
            [
                (
                    f"1f1b {opt}",
                    {"opt": opt, "sched": "1f1b"},
                    {**knobs, **SYNC_EF},
                    n(0.2),
                    [{"rate": 0.004}, {"rate": 0.002}],
                ),
                (f"P=8 {opt}, plain", {"opt": opt, "P": 8}, knobs, n(0.2), [{"rate": 0.002}, {"rate": 0.001}]),
                (
                    f"P=8 {opt}, corrected",
                    {"opt": opt, "P": 8},
                    {**knobs, **EF, **SMOOTH, **LR},
                    n(0.3),
                    [{"rate": 0.001, "factor": 1.0}],
                ),
                (
                    f"2bw {opt}, corrected",
                    {"opt": opt, "sched": "2bw"},
                    {**knobs, **EF, **SMOOTH},
                    n(0.2),
                    [{"rate": 0.001, "factor": 2.0}],
                ),
            ],
            turns=3,
        )
if which == "longer":
    for ns in (5, 3, 2, 4, 1, -5):
        c = {"ns": ns}
        campaign(
            [],
            turns=1,
            rows=[
                (f"ns {ns}: 1f1b", {**c, "sched": "1f1b"}),
                (f"ns {ns}: 1f1b, feedback 1", {**c, "sched": "1f1b", "lam_min": 1.0}),
                (
                    f"ns {ns}: 2bw, feedback 2, flush_first 150",
                    {**c, "sched": "2bw", "factor": 2.0, "flush_first": 150},
                ),
                (f"ns {ns}: 2bw, feedback 2", {**c, "sched": "2bw", "factor": 2.0}),
            ],
        )
    for updates in (1000, 2000):
        UPDATES = updates
        rows = []
        for rate in (0.004, 0.008):
            rows.append((f"{updates}: 1f1b", {"sched": "1f1b", "rate": rate}))
            rows.append((f"{updates}: 1f1b, feedback 1", {"sched": "1f1b", "rate": rate, "lam_min": 1.0}))
            rows += [(f"{updates}: P=8, feedback {x}", {"P": 8, "rate": rate, "factor": x}) for x in (0.5, 1.0)]
            rows += [
                (f"{updates}: P=8, smooth feedback {x}", {"P": 8, "rate": rate, "factor": x, "ef_beta": 0.9})
                for x in (0.2, 0.7)
            ]
            rows.append((f"{updates}: P=4, feedback 1", {"P": 4, "rate": rate, "factor": 1.0}))
            rows.append((f"{updates}: 2bw, feedback 2", {"sched": "2bw", "rate": rate, "factor": 2.0}))
        campaign([], turns=1, rows=rows)
        campaign(
            [],
            turns=1,
            rows=[
                (f"{updates}: P=8 every 8, feedback {x}", {"P": 8, "every": 8, "rate": rate, "factor": x})
                for x in (1.0, 2.0)
                for rate in (0.004, 0.008)
            ],
        )
print(f"# {which} ends {deadline - time.time():.0f} s before its deadline", flush=True)
