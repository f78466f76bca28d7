"""`stagewright experiment convergence`: run every method and seed, then draw and print."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from ..launcher import launch
from .curves import Curve, MethodResult, summarize, within_spread
from .methods import METHODS

REFERENCE = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceOptions:
    """Train the same GPT by several methods, on the same data and seeds: validation loss against steps and time."""

    steps: int = 300
    """Batches of each run."""
    seeds: int = 3
    """Runs of each method: seeds 0, 1, ..."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods to compare: single, 1f1b, 2bw, pipedream, 1f1b-warmup, 2bw-warmup."""
    microbatches: int = 2
    """M: with two ranks and M=2 a third of 1f1b's time is bubble."""
    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """Size of the hidden vectors."""
    length: int = 64
    """Bytes of one sequence."""
    batch: int = 16
    """Sequences of one batch."""
    lr: float = 2e-3
    """Peak learning rate of AdamW, down along a cosine."""
    beta1: float = 0.9
    """AdamW's momentum. A late gradient makes momentum less stable: see docs/convergence.md."""
    evaluate_every: int = 25
    """Steps from one validation to the next."""
    windows: int = 128
    """Validation sequences."""
    out: Path = Path("runs/convergence")
    """results.json and convergence.png go here."""
    json: bool = False
    """Print one JSON object; progress goes to the standard error."""

    def check(self) -> None:
        """ValueError for what cannot be meant."""
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"--methods {name}: expected some of {', '.join(METHODS)}")
        if REFERENCE not in self.methods:
            raise ValueError(f"--methods {' '.join(self.methods)}: expected {REFERENCE} among them, to compare with")
        for option in ("steps", "seeds", "microbatches", "layers", "width", "length", "batch", "evaluate_every"):
            if getattr(self, option) < 1:
                raise ValueError(f"--{option.replace('_', '-')} {getattr(self, option)}: expected at least 1")
        if self.batch < self.microbatches:
            raise ValueError(f"--batch {self.batch} for --microbatches {self.microbatches}: one would be empty")


def run(argv: Sequence[str]) -> int:
    """Run, draw, print; 1 if a run failed."""
    options = tyro.cli(ConvergenceOptions, args=argv, prog="stagewright experiment convergence")
    options.check()
    options.out.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory(prefix="stagewright-convergence-") as folder:
        for seed in range(options.seeds):
            for method in options.methods:  # in turn, so that what disturbs the machine disturbs all of them
                curve = _run_one(options, method, seed, Path(folder) / "curve.json")
                if curve is None:
                    return 1
                curves.append(curve)
                _write(options, curves)
    from .plot import draw

    results = summarize(curves, reference=REFERENCE)
    answer = _write(options, curves)
    picture = draw(curves, options.out / "convergence.png")
    print(json.dumps(answer) if options.json else f"{table(results)}\n\n{picture}")
    return 0


def _write(options: ConvergenceOptions, curves: Sequence[Curve]) -> dict[str, object]:
    """results.json with what there is so far."""
    done = any(curve.method == REFERENCE for curve in curves)
    results = summarize(curves, reference=REFERENCE) if done else []
    config = {name: value for name, value in asdict(options).items() if name not in ("out", "json")}
    answer: dict[str, object] = {
        "config": config,
        "results": [asdict(r) for r in results],
        "curves": [asdict(c) for c in curves],
    }
    (options.out / "results.json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return answer


def _run_one(options: ConvergenceOptions, method: str, seed: int, out: Path) -> Curve | None:
    words = {
        "method": method,
        "seed": seed,
        "steps": options.steps,
        "microbatches": options.microbatches,
        "layers": options.layers,
        "width": options.width,
        "length": options.length,
        "batch": options.batch,
        "lr": options.lr,
        "beta1": options.beta1,
        "evaluate-every": options.evaluate_every,
        "windows": options.windows,
        "out": out,
    }
    arguments = [str(part) for name, value in words.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-P", "-m", f"{__package__}.worker", *arguments]
    result = launch(command, num_ranks=METHODS[method].num_ranks, environment={"OMP_NUM_THREADS": "1"})
    if result.status != 0:
        print(f"stagewright experiment convergence: {method}, seed {seed}: {result.report}", file=sys.stderr)
        return None
    curve = Curve(**json.loads(out.read_text(encoding="utf-8")))
    done = f"{method}, seed {seed}: loss {curve.final_loss:.3f} after {curve.seconds[-1]:.1f} s of training"
    print(done, file=sys.stderr, flush=True)
    return curve


def table(results: Sequence[MethodResult]) -> str:
    """The results for people."""
    head = f"{'method':<12} {'final loss':>10}  {'over seeds':<16} {'tokens/s':>9}"
    lines = [f"{head}   to a loss that both reach, against {REFERENCE}"]
    for r in results:
        spread = f"{r.low:.3f} .. {r.high:.3f}"
        times = f"{r.seconds_to_common:.1f} s / {r.reference_seconds:.1f} s to {r.common_loss:.3f}"
        faster = r.reference_seconds / r.seconds_to_common
        lines.append(
            f"{r.method:<12} {r.final:>10.3f}  {spread:<16} {r.tokens_per_second:>9,.0f}   {times}: {faster:.2f} x"
        )
    for method in ("2bw", "pipedream"):
        if any(r.method == method for r in results):
            said = "within" if within_spread(results, method, REFERENCE) else "outside"
            lines.append(f"{method} ends {said} the seed spread of {REFERENCE} at the same number of tokens")
    return "\n".join(lines)
